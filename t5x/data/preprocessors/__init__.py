"""Preprocessors with the names and semantics of seqio's and t5's. Each takes one example.

They are listed in a task's `preprocessors`, with `functools.partial` if they need arguments:

    preprocessors=[
        functools.partial(rekey, key_map={"inputs": "question", "targets": "answer"}),
        tokenize,
        append_eos,
    ]

Pre-training on text, as for T5:

    preprocessors=[
        functools.partial(rekey, key_map={"inputs": None, "targets": "text"}),
        tokenize,
        span_corruption,
        append_eos_after_trim,
    ]
"""

# ruff: noqa: F401

from t5x.data.preprocessors.denoising import (
    UL2_DENOISERS,
    UL2_MODE_TOKENS,
    Denoiser,
    iid_denoising,
    prefix_lm,
    random_spans_helper,
    select_random_chunk,
    span_corruption,
    split_tokens,
    ul2,
)
from t5x.data.preprocessors.text_to_text import (
    filter_by_string_length,
    glue,
    lower_text,
    monot5,
    parse_tsv,
    preprocess_tsv,
    squad,
    stsb,
    summarize,
    translate,
)
from t5x.data.preprocessors.tokenization import (
    append_eos,
    append_eos_after_trim,
    rekey,
    tokenize,
    tokenize_and_append_eos,
    truncate_inputs_left,
)

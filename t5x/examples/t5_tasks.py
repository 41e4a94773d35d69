"""Tasks of the package t5 that need no TensorFlow: WMT, C4 and GLUE, under t5's names.

`import t5.data.mixtures` in a gin file, `--import=t5.data.tasks` and MIXTURE_OR_TASK_MODULE = 't5.data.mixtures' mean
this module if t5 is not installed. A task is made when it is asked for: its TFDS dataset must have been prepared.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from t5x import metrics
from t5x.data import (
    CacheDatasetPlaceholder,
    Feature,
    SentencePieceVocabulary,
    Task,
    TaskRegistry,
    TfdsDataSource,
)
from t5x.data.preprocessors import (
    append_eos_after_trim,
    glue,
    rekey,
    span_corruption,
    stsb,
    tokenize,
    translate,
)
from t5x.data.tasks import other_registries
from t5x.examples.recipes.tasks import label_index

_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"

_TOKENIZED = (tokenize, CacheDatasetPlaceholder(), append_eos_after_trim)

_TRANSLATIONS = {
    "wmt_t2t_ende_v003": ("wmt_t2t_translate/de-en:1.0.0", "en", "de"),
    "wmt14_ende_v003": ("wmt14_translate/de-en:1.0.0", "en", "de"),
    "wmt14_enfr_v003": ("wmt14_translate/fr-en:1.0.0", "en", "fr"),
    "wmt15_enfr_v003": ("wmt15_translate/fr-en:1.0.0", "en", "fr"),
    "wmt16_enro_v003": ("wmt16_translate/ro-en:1.0.0", "en", "ro"),
    "wmt19_ende_v003": ("wmt19_translate/de-en:1.0.0", "en", "de"),
}
_INFERENCE = ("entailment", "neutral", "contradiction")
_ENTAILMENT = ("entailment", "not_entailment")
_GLUE_LABELS = {
    "cola": ("unacceptable", "acceptable"), "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"), "qqp": ("not_duplicate", "duplicate"), "stsb": (),
    "mnli": _INFERENCE, "mnli_matched": _INFERENCE, "mnli_mismatched": _INFERENCE, "ax": _INFERENCE,
    "qnli": _ENTAILMENT, "rte": _ENTAILMENT, "wnli": ("not_entailment", "entailment"),
}  # fmt: skip
_GLUE_METRICS = {
    "cola": [metrics.matthews_corrcoef],
    "mrpc": [metrics.f1_score_with_invalid, metrics.accuracy],
    "qqp": [metrics.f1_score_with_invalid, metrics.accuracy],
    "stsb": [metrics.pearson_corrcoef, metrics.spearman_corrcoef],
    "ax": [],
}


class _Recipe(NamedTuple):
    """What a task is made of, besides its vocabulary."""

    dataset: str
    preprocessors: Sequence[Callable[..., Any]]
    metric_fns: Sequence[Callable[..., Any]] = ()
    postprocess_fn: Callable[..., Any] | None = None


def _recipes() -> dict[str, _Recipe]:
    recipes = {}
    for name, (dataset, source, target) in _TRANSLATIONS.items():
        text: Callable[..., Any] = functools.partial(translate, source_language=source, target_language=target)
        recipes[name] = _Recipe(dataset, [text, *_TOKENIZED], [metrics.bleu])
    document = functools.partial(rekey, key_map={"inputs": None, "targets": "text"})
    recipes["c4_v220_span_corruption"] = _Recipe(
        "c4/en:2.2.0", [document, tokenize, CacheDatasetPlaceholder(), span_corruption, append_eos_after_trim]
    )
    for name, labels in _GLUE_LABELS.items():
        prefix = "mnli" if labels is _INFERENCE else name
        text = stsb if name == "stsb" else functools.partial(glue, benchmark_name=prefix, label_names=labels)
        recipes[f"glue_{name}_v002"] = _Recipe(
            f"glue/{name}",
            [text, *_TOKENIZED],
            _GLUE_METRICS.get(name, [metrics.accuracy]),
            _number if name == "stsb" else functools.partial(label_index, labels=labels),
        )
    return recipes


def _number(decoded: str, **_: Any) -> float:
    try:
        return float(decoded)
    except ValueError:
        return -1.0


_RECIPES = _recipes()


def names() -> tuple[str, ...]:
    return tuple(_RECIPES)


def find(name: Any) -> Task | None:
    """Register and return the task of this name; None if there is none. See `t5x.data.tasks.OtherRegistry`."""
    if name not in _RECIPES:
        return None
    recipe = _RECIPES[name]
    vocabulary = SentencePieceVocabulary(_VOCABULARY, extra_ids=100)
    features = {
        feature: Feature(vocabulary, add_eos=True, required=feature == "targets") for feature in ("inputs", "targets")
    }
    return TaskRegistry.add(
        name,
        TfdsDataSource(recipe.dataset),
        features,
        recipe.preprocessors,
        postprocess_fn=recipe.postprocess_fn,
        metric_fns=recipe.metric_fns,
    )


def __getattr__(name: str) -> Any:
    """Let `t5.data.mixtures` and `t5.data.tasks` be this module."""
    if name in ("data", "mixtures", "tasks"):
        return sys.modules[__name__]
    raise AttributeError(f"t5 is not installed, and t5x has no {name!r} in its place")


other_registries.append(sys.modules[__name__])

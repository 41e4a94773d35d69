"""Tasks over real data sets, as a user would write them. The directory comes from the environment."""

import functools
import gzip
import json
import os
import zipfile
from pathlib import Path

from t5x import data
from t5x.data import preprocessors
from t5x.metrics import exact_match

DIRECTORY = Path(os.environ["REAL_DATA"])
VOCABULARY = data.SentencePieceVocabulary(DIRECTORY / "t5_vocab/spiece.model", extra_ids=100)
FEATURES = {name: data.Feature(VOCABULARY) for name in ("inputs", "targets")}


def multi30k(split):
    files = (DIRECTORY / f"multi30k_ende/{split}.{language}.gz" for language in ("en", "de"))
    english, german = (gzip.decompress(file.read_bytes()).decode().splitlines() for file in files)
    return [{"en": e, "de": d} for e, d in zip(english, german, strict=True)]


def squad(split):
    with zipfile.ZipFile(DIRECTORY / "squad_dev_v1.1/dev-v1.1.json.zip") as archive:
        articles = json.loads(archive.read(archive.namelist()[0]))["data"]
    return [
        {"id": qa["id"], "title": article["title"], "context": paragraph["context"], "question": qa["question"],
         "answers": {"text": [answer["text"] for answer in qa["answers"]]}}
        for article in articles[:5] for paragraph in article["paragraphs"] for qa in paragraph["qas"]
    ]  # fmt: skip


data.TaskRegistry.add(
    "multi30k_ende",
    source=data.FunctionDataSource(multi30k, splits=("train", "val")),
    preprocessors=[
        functools.partial(preprocessors.translate, source_language="en", target_language="de"),
        preprocessors.tokenize,
        preprocessors.append_eos_after_trim,
    ],
    output_features=FEATURES,
    metric_fns=[exact_match],
)
data.TaskRegistry.add(
    "wikitext2_span_corruption",
    source=data.TextLineDataSource({"train": str(DIRECTORY / "wikitext2/wiki.valid.raw")}),
    preprocessors=[
        functools.partial(preprocessors.rekey, key_map={"targets": "text"}),
        preprocessors.tokenize,
        preprocessors.span_corruption,
        preprocessors.append_eos_after_trim,
    ],
    output_features=FEATURES,
)
data.TaskRegistry.add(
    "squad",
    source=data.FunctionDataSource(squad, splits=("train",)),
    preprocessors=[preprocessors.squad, preprocessors.tokenize, preprocessors.append_eos_after_trim],
    output_features=FEATURES,
    metric_fns=[exact_match],
)
data.MixtureRegistry.add(
    "all_real",
    ["multi30k_ende", ("wikitext2_span_corruption", 1000.0), "squad"],
    default_rate=functools.partial(data.rate_num_examples, maximum=1000),
)

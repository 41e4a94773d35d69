"""Training data of the ranking recipes, read from the published files.

DATA_DIR/msmarco_dl/judged_dl21.jsonl.gz      judged passages of TREC Deep Learning 2021, one JSON object per line:
                                              qid, query, docid, passage, grade (0 to 3)
DATA_DIR/msmarco_dl/bm25_top100_dl21.json.gz  BM25's results for its queries: query, hits (qid, docid, content)
DATA_DIR/trecqa_wang/train.csv, dev.csv       TREC-QA: qtext, label, atext
DATA_DIR/squad_dev_v1.1/dev-v1.1.json.zip     SQuAD: a question's paragraph among those of its article
"""

import functools
import io
import json
import os
import zipfile
from collections.abc import Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x.apps.ranking import tasks
from t5x.apps.ranking.judged_data import Passage
from t5x.apps.ranking.templates import MONOT5, Template
from t5x.data import FunctionDataSource, Mixture, Task, Vocabulary
from t5x.files.user_files import read_bytes

PARTS = {"dl21": 1.0, "trecqa": 0.5, "squad": 2.0}
HELD_OUT = 0.2  # share of the queries of TREC Deep Learning 2021


def pairs(
    directory: str, vocabulary: Vocabulary, template: Template = MONOT5, parts: Sequence[str] = tuple(PARTS)
) -> Mixture:
    """Return a mixture of query-passage pairs, as many relevant as irrelevant ones.

    The split `validation` has all pairs of held-out queries.

    Args:
      parts: which of dl21, trecqa and squad; the tasks are named dl21_pairs and so on.
    """
    return _mixture("pairs", tasks.pairs, directory, vocabulary, template, parts)


def lists(
    directory: str, vocabulary: Vocabulary, template: Template = MONOT5, parts: Sequence[str] = tuple(PARTS)
) -> Mixture:
    """Return a mixture of lists of passages for a query, for the listwise loss."""
    return _mixture("lists", tasks.lists, directory, vocabulary, template, parts)


def _mixture(form: str, make: Any, directory: str, vocabulary: Vocabulary, template: Template, parts: Any) -> Mixture:
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"There is no part {unknown[0]!r} (parts: {', '.join(map(repr, PARTS))}).")
    place = functools.partial(os.path.join, directory)
    options: dict[str, dict[str, Any]] = {
        "dl21": {
            "judged": {"train": place("msmarco_dl", "judged_dl21.jsonl.gz")},
            "candidates": place("msmarco_dl", "bm25_top100_dl21.json.gz"),
            "relevance_level": 2,
            "held_out": HELD_OUT,
        },
        "trecqa": {
            "judged": {split: place("trecqa_wang", f"{file}.csv") for split, file in _TRECQA.items()},
            "fields": {"query": "qtext", "passage": "atext"},
        },
        "squad": {"judged": _squad(place("squad_dev_v1.1", "dev-v1.1.json.zip"))},
    }
    parts_as_tasks: list[Task] = [
        make(vocabulary=vocabulary, template=template, name=f"{part}_{form}", **options[part]) for part in parts
    ]
    return tasks.mixture(parts_as_tasks, [PARTS[part] for part in parts], name=f"ranking_{form}")


_TRECQA = {"train": "train", "validation": "dev"}


@functools.cache
def _squad(path: str) -> FunctionDataSource:
    return FunctionDataSource(functools.partial(_questions, path=path), splits=("train",))


def _questions(split: str, path: str) -> list[dict[str, Any]]:
    """Return every question with its paragraph, and the other paragraphs of the article as less relevant ones."""
    with zipfile.ZipFile(io.BytesIO(read_bytes(path))) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".json")]
        articles = json.loads(archive.read(name))["data"]
    examples = []
    for article in articles:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        passages = [Passage(f"{article['title']}/{number}", text, 0) for number, text in enumerate(texts)]
        for number, paragraph in enumerate(article["paragraphs"]):
            others = tuple(passages[:number] + passages[number + 1 :])
            for question in paragraph["qas"]:
                examples.append(
                    {
                        "query_id": question["id"],
                        "query": question["question"],
                        "doc_id": passages[number].doc_id,
                        "passage": passages[number].text,
                        "grade": 1,
                        "others": others,
                    }
                )
    return examples

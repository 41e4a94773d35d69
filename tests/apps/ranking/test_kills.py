"""Reranking that is killed gives the bytes of a run that is not; `million.py` does more of it."""

import random
import signal

import pytest

from t5x.apps.ranking.ranking_options import RerankOptions
from t5x.apps.ranking.rerank_job import rerank
from tests.apps.ranking import million
from tests.support.programs import wait_for

OPTIONS = ["--batch_size=16", "--checkpoint_period=2"]


@pytest.mark.slow
def test_through_a_kill(tmp_path):
    million.prepare(tmp_path, 600, passages=20)
    process = million.start(tmp_path, tmp_path / "killed.trec", *OPTIONS)
    wait_for(lambda: million.chunks(tmp_path / "killed.trec") >= 2, process, "the second chunk")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed.trec").exists()
    million.run(tmp_path, tmp_path / "killed.trec", 0, random.Random(), *OPTIONS)
    assert million.check(tmp_path, tmp_path / "killed.trec") == 600
    assert "resuming after" in (tmp_path / "log").read_text()
    files = {"run": "run.trec", "collection": "collection.tsv", "topics": "topics.tsv"}
    rerank(
        RerankOptions(
            model=str(tmp_path / "model"), **{name: str(tmp_path / file) for name, file in files.items()},
            output=str(tmp_path / "undisturbed.trec"), template="{query} {document} ?", labels="a,b", max_length=48,
            batch_size=16, checkpoint_period=2,
        )
    )  # fmt: skip
    assert (tmp_path / "undisturbed.trec").read_bytes() == (tmp_path / "killed.trec").read_bytes()

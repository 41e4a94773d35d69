"""Training runs whose MODEL_DIR is on a real S3 or GCS server. Kills are in tests/chaos/harness.py (--store)."""

import json

import pytest

from t5x.files import mirror
from t5x.files.remote import RemotePath
from tests.chaos.harness import Result
from tests.object_stores import proxy
from tests.support.programs import SMALL

pytestmark = pytest.mark.nightly

GIN = "t5x/examples/demo/dates.gin"


@pytest.fixture
def train(run_here):
    def run(model_dir: object, steps: int, *more: str):
        return run_here(
            "train", f"--gin_file={GIN}", *SMALL, f"--gin.MODEL_DIR='{model_dir}'", f"--gin.TRAIN_STEPS={steps}",
            "--gin.utils.SaveCheckpointConfig.period=2", "--gin.utils.SaveCheckpointConfig.keep=1", *more,
        )  # fmt: skip

    return run


def test_a_run_that_resumes_there_ends_like_a_local_one(store, train, tmp_path):
    local, url = tmp_path / "run", f"{store.url}/resumed"
    assert train(local, 6).code == 0
    store.proxy.rate, store.proxy.faults = 0.02, proxy.FAULTS
    first = train(url, 3)
    assert first.code == 0, first.err
    second = train(url, 6)
    assert second.code == 0 and f"{url}/checkpoint_3" in second.err
    store.proxy.rate = 0.0
    Result.of(url, 6).assert_same(Result.of(local, 6))
    files = RemotePath.parse(url)
    files.fs.invalidate_cache()
    names = {name.split("/")[0] for name in files.descendants()}
    assert names == {"checkpoint_6", "config.gin", "model-info.txt", "train"}
    events = [name for name in files.descendants() if "tfevents" in name]
    assert len(events) == 2, "one of each start"


def test_metrics_are_there_with_the_checkpoint(store, train, monkeypatch):
    """What a kill after a checkpoint leaves: nothing more is uploaded when the run ends."""
    monkeypatch.setattr(mirror.Mirror, "close", lambda self: self._stopped.set())
    url = f"{store.url}/killed"
    assert train(url, 2).code == 0
    lines = (RemotePath.parse(url) / "train/metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert b"MODEL_DIR" in (RemotePath.parse(url) / "config.gin").read_bytes()


def test_access_that_is_denied_is_one_message(store, train):
    store.proxy.rate, store.proxy.faults = 1.0, ("403",)
    train(f"{store.url}/denied", 2).refused("denied", "Sign in")


def test_a_bucket_that_does_not_exist_is_named(store, train):
    train(store.url.replace("bucket", "no-such-bucket") + "/run", 2).refused("no-such-bucket")

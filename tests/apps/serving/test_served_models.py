"""Models of a server that are replaced by newer checkpoints."""

import dataclasses
import threading
import time

import pytest

from t5x.apps.serving.batching import CURRENT_CALL, Batcher, Call
from t5x.apps.serving.security import ApiError
from t5x.apps.serving.served_models import ServedModels, ServerMetrics
from t5x.apps.serving.settings import ServerSettings
from t5x.checkpoints.convert import convert
from t5x.checkpoints.formats import open_checkpoint
from tests.inference.models import byte_model


@pytest.fixture
def batcher():
    made = Batcher(max_rows=2, max_wait=0.01, observe=lambda *_: None)
    yield made
    made.close()


def put_checkpoint(tmp_path, step: int) -> None:
    """Adds a checkpoint of another model to the MODEL_DIR."""
    source = open_checkpoint(byte_model(tmp_path / f"model_{step}", seed=step))
    (tmp_path / "run").mkdir(exist_ok=True)
    convert(dataclasses.replace(source, step=step), str(tmp_path / "run" / f"checkpoint_{step}"), to="t5x")


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_newer_checkpoint_replaces_a_model_unless_it_is_damaged(tmp_path, batcher):
    put_checkpoint(tmp_path, 3)
    settings = ServerSettings(max_input_length=32, max_length=16)
    models = ServedModels({"m": str(tmp_path / "run")}, settings, batcher, metrics := ServerMetrics())
    assert not models.is_ready
    models.load()
    assert models.is_ready and list(models) == ["m"]
    CURRENT_CALL.set(Call(60))
    name, old = models.get(None)
    before = old.generate("abc def", max_length=8).text
    stop = threading.Event()
    watching = threading.Thread(target=models.watch, args=(0.05, stop))
    watching.start()
    try:
        (tmp_path / "run" / "checkpoint_5").mkdir()
        (tmp_path / "run" / "checkpoint_5" / "MANIFEST.json").write_text("{}")
        time.sleep(0.3)
        assert models.get("m")[1] is old
        put_checkpoint(tmp_path, 8)
        wait_for(lambda: models.get("m")[1] is not old)
    finally:
        stop.set()
        watching.join()
    assert name == "m" and models.get("m")[1].source.step == 8
    assert models.get("m")[1].generate("abc def", max_length=8).text != before
    assert old.generate("abc def", max_length=8).text == before  # requests in progress
    assert 't5x_reloads_total{model="m",result="ok"} 1' in metrics.text()
    with pytest.raises(ApiError, match="Models: m"):
        models.get("../run")

"""Inference over a task, with INFER_OUTPUT_DIR on real S3 and GCS servers."""

import pytest

from t5x.files.directory import open_directory
from tests.inference.test_tasks import ends_after, expected, model, place, real_model, run  # noqa: F401
from tests.object_stores import proxy

pytestmark = pytest.mark.nightly


def test_a_run_that_ended_continues_and_a_complete_one_stays(store, place, model, expected, monkeypatch):  # noqa: F811
    store.proxy.rate, store.proxy.faults = 0.01, tuple(set(proxy.FAULTS) - {"delay"})
    output = open_directory(f"{store.url}/task-inference")
    with pytest.raises(KeyboardInterrupt):
        run(place, model, output, write_fn=ends_after(1))
    assert f"{expected.name}-chunk00000.COMPLETED" in (output / f"tmp-{expected.name}").names()
    run(place, model, output)
    assert output.read_bytes(expected.name) == expected.read_bytes()
    assert output.names() == {expected.name, f"{expected.name}.COMPLETED", "model-info.txt"}
    monkeypatch.setattr("t5x.runs.infer.Engine", None)
    run(place, model, output)  # it is complete

"""`t5x eval` of a run on real S3 and GCS servers, with its output there too."""

import shutil

import pytest

from t5x._runtime.errors import UserError
from t5x.files import mirror
from t5x.files.directory import open_directory
from t5x.files.remote import RemotePath
from tests.object_stores import proxy, servers
from tests.runs.test_eval import WithJson, fresh, model_dir, score  # noqa: F401

pytestmark = pytest.mark.nightly


class Killed(BaseException):
    pass


def test_a_killed_evaluation_continues_with_the_next_checkpoint(store, model_dir, tmp_path, monkeypatch):  # noqa: F811
    expected = score(model_dir, tmp_path / "local")
    run = RemotePath.parse(f"{store.url}/run")
    run.fs.put(f"{model_dir}/", run.path, recursive=True)
    store.proxy.rate, store.proxy.faults = 0.01, tuple(set(proxy.FAULTS) - {"delay"})
    seen = []

    def dying(**arguments):
        evaluator = WithJson(**arguments)
        compute = evaluator.evaluate

        def evaluate(*, step, **functions):
            seen.append(step)
            if seen == [0, 1]:
                raise Killed
            return compute(step=step, **functions)

        evaluator.evaluate = evaluate
        return evaluator

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(mirror.Mirror, "close", lambda self: None)  # a kill uploads nothing
        score(run.url, f"{store.url}/out", inference_evaluator_cls=dying)
    shutil.rmtree(tmp_path / "cache")  # another machine continues
    assert score(run.url, f"{store.url}/out", inference_evaluator_cls=dying) == expected
    assert seen == [0, 1, 1, 2]
    found, local = (open_directory(f"{place}/inference_eval") for place in (f"{store.url}/out", tmp_path / "local"))
    assert found.names() == local.names()
    for name in local.names():
        assert found.read_bytes(name) == local.read_bytes(name)


def test_an_output_that_cannot_be_written_is_named(store, model_dir):  # noqa: F811
    missing = store.url.replace(servers.BUCKET, "no-such-bucket")
    with pytest.raises(UserError, match=f"EVAL_OUTPUT_DIR {missing}.*bucket"):
        score(model_dir, f"{missing}/out")

"""Outputs of jobs on real S3 and GCS servers: those of a local run, whatever happens."""

import re
import shutil

import pytest

from t5x.files import lease
from t5x.files.directory import open_directory
from t5x.inference.output import FileOutput
from tests.inference.conftest import VERBS, run_verb, verb_inputs, verb_model  # noqa: F401
from tests.object_stores import proxy, servers

pytestmark = pytest.mark.nightly


@pytest.fixture
def place(store, request):
    """A directory of its own for every test."""
    name = re.sub(r"\W", "-", request.node.name)
    return open_directory(f"{store.url}/{name}")


@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_job_resumes_in_spite_of_faults(verb, store, place, run_verb, verb_inputs, tmp_path, monkeypatch):  # noqa: F811
    assert run_verb(verb, tmp_path / "out").code == 0
    name, write = VERBS[verb][1], FileOutput.write
    place.write_bytes(name, (verb_inputs / name).read_bytes())
    store.proxy.rate = 0.05 if verb == "infer" else 0.01
    store.proxy.faults = tuple(set(proxy.FAULTS) - {"delay"})

    def kill(self, *args):
        if len(self._chunks.finished) == 2:
            raise KeyboardInterrupt
        write(self, *args)

    arguments = verb, place.path("out"), f"--input={place.path(name)}"
    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "write", kill)
        assert run_verb(*arguments).code == 130
    assert not place.exists("out") and len((place / "tmp-out").names()) == 5
    shutil.rmtree(tmp_path / "cache")  # another machine continues
    done = run_verb(*arguments)
    assert done.code == 0 and "resuming after 2 finished chunk(s)" in done.err
    assert place.read_bytes("out") == (tmp_path / "out").read_bytes()
    assert place.names() == {name, "out"}
    run_verb(*arguments).refused("exists already", "--overwrite")


def test_a_second_job_on_the_same_output_is_refused(place, run_verb, monkeypatch):  # noqa: F811
    for name, seconds in {"_TERM": 5.0, "_PERIOD": 0.1, "_POLL": 0.2}.items():
        monkeypatch.setattr(lease, name, seconds)
    with (place / "tmp-out").locked():
        run_verb("infer", place.path("out")).refused(place.path("tmp-out"), "is in use by process")
    assert run_verb("infer", place.path("out")).code == 0


def test_a_bucket_that_cannot_be_written_is_reported_before_the_model_is_loaded(store, run_verb):  # noqa: F811
    missing = store.url.replace(servers.BUCKET, "no-such-bucket")
    run_verb("infer", f"{missing}/out").refused(f"--output {missing}/out", "bucket")
    store.proxy.rate, store.proxy.faults = 1.0, ("403",)
    run_verb("infer", f"{store.url}/out").refused(f"{store.url}/out", "access is denied", "Sign in")

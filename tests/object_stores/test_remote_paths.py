"""Checkpoints and data on real S3 and GCS servers, which drop, delay and refuse some of the requests."""

import json
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import convert
from t5x.checkpoints.formats import open_checkpoint
from t5x.data import TaskRegistry
from t5x.files import remote
from t5x.files.directory import open_directory
from t5x.files.remote import RemotePath
from tests.checkpoints.formats import huggingface_models as models
from tests.object_stores import proxy, servers

pytestmark = pytest.mark.nightly


def values(path) -> dict[str, np.ndarray]:
    return {name: array.read() for name, array in open_checkpoint(path).arrays.items()}


@pytest.mark.parametrize("format", ["t5x", "native", "hf"])
def test_checkpoints_are_written_and_read_in_spite_of_faults(store, tmp_path, format):
    hf = models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config())
    url = f"{store.url}/{format}"
    store.proxy.rate, store.proxy.faults = 0.1, tuple(set(proxy.FAULTS) - {"delay"})
    convert.convert(hf, url, to=format)
    found, expected = values(url), values(hf)
    assert found.keys() >= expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert store.proxy.injected


def test_leftovers_of_a_killed_conversion_are_replaced(store, tmp_path):
    hf = models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config())
    place = open_directory(f"{store.url}/killed")
    place.write_bytes("UNFINISHED", b"{}")
    place.write_bytes("model-00001-of-00002.safetensors", b"part")
    convert.convert(hf, str(tmp_path / "local"), to="hf")
    convert.convert(hf, str(place), to="hf")
    assert place.names() == open_directory(tmp_path / "local").names()
    with pytest.raises(UserError, match="--overwrite"):
        convert.convert(hf, str(place), to="hf")
    (place / "state").write_bytes("other", b"")
    convert.convert(hf, str(place), to="hf", overwrite=True)
    assert place.names() == open_directory(tmp_path / "local").names()
    assert not open_directory(store.url).exists("killed.UNFINISHED")
    np.testing.assert_equal(values(str(place)), values(hf))


def test_a_data_file_is_read(store, run_here):
    file = RemotePath.parse(f"{store.url}/train.jsonl")
    lines = [json.dumps({"inputs": f"line {n}", "targets": "a"}) for n in range(3)]
    file.fs.pipe_file(file.path, "\n".join(lines).encode())
    store.proxy.rate, store.proxy.faults = 0.5, ("drop", "truncated", "503")
    shown = run_here("data", "--data", file.url, "--vocabulary", "bytes")
    TaskRegistry.remove("file")
    assert shown.code == 0, shown.err
    assert all(f"line {n}" in shown.out for n in range(3))


def test_rankings_are_read_and_measured(store, run_here, tmp_path):
    place = open_directory(f"{store.url}/ranking")
    for files in (place, open_directory(tmp_path)):
        files.write_bytes("qrels.txt", b"1 0 a 1\n2 0 b 1\n")
        files.write_bytes("run.trec", b"1 Q0 b 1 2.0 x\n1 Q0 a 2 1.0 x\n2 Q0 b 1 1.0 x\n")
        shown = run_here(
            "rank-eval", files.path("run.trec"), "--qrels", files.path("qrels.txt"), "--per_query", files.path("out")
        )
        assert shown.code == 0, shown.err
    assert place.read_bytes("out") == (tmp_path / "out").read_bytes()


def test_missing_remote_path_is_named(store, run_here):
    for url in (f"{store.url}/nothing", store.url.replace(servers.BUCKET, "no-such-bucket") + "/model"):
        run_here("inspect", url).refused(url)


def test_generations_protect_gcs_objects(server):
    if not server.url.startswith("gs"):
        pytest.skip("S3 servers check preconditions themselves")

    def upload(**query: str) -> int:
        query = urllib.parse.urlencode({"uploadType": "media", "name": "lease", **query})
        address = f"{server.proxy.url}/upload/storage/v1/b/{servers.BUCKET}/o?{query}"
        try:
            with urllib.request.urlopen(urllib.request.Request(address, b"mine", method="POST")) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    assert [upload(ifGenerationMatch="0"), upload(ifGenerationMatch="0")] == [200, 412]


def test_requests_to_a_silent_server_time_out(store, monkeypatch):
    if store.url.startswith("s3"):
        pytest.skip("s3fs has limits of its own")
    monkeypatch.setenv("T5X_REMOTE_TIMEOUT", "0.2")
    monkeypatch.setattr(remote, "_RETRY_DELAYS", ())
    store.proxy.latency = 1.0
    with pytest.raises(UserError, match="T5X_REMOTE_TIMEOUT"):
        (RemotePath.parse(store.url) / "file").read_bytes()

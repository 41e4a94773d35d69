"""Checkpoints by name: the Hub, served by a local mirror, and the public checkpoints of T5X."""

import json
import os
import re

import huggingface_hub.constants
import pytest

import t5x
from t5x._runtime.errors import UserError
from t5x.checkpoints import names
from t5x.checkpoints.formats import open_checkpoint
from t5x.data import SentencePieceVocabulary
from tests.inference.models import byte_model
from tests.support import hub_mirror, programs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with files that must not be downloaded."""
    directory = byte_model(tmp_path_factory.mktemp("models") / "tiny")
    for name in ("pytorch_model.bin", "flax_model.msgpack", "tf_model.h5", "training_args.bin", "README.md"):
        (directory / name).write_bytes(b"not for us")
    return directory


@pytest.fixture
def mirror(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub_mirror.serve({"acme/tiny": model, "acme/secret": model}, private={"acme/secret": "hf_token"}) as mirror:
        monkeypatch.setenv("HF_ENDPOINT", mirror.url)
        yield mirror


@pytest.mark.parametrize("name", ["acme/tiny", "hf://acme/tiny", "acme/tiny@main"])
def test_a_model_of_the_hub_is_read_through_its_cache(mirror, model, name):
    expected, source = open_checkpoint(str(model)), open_checkpoint(name)
    assert source.config == expected.config and source.vocabulary_files == expected.vocabulary_files
    assert source.path.endswith(f"models--acme--tiny/snapshots/{mirror.commit('acme/tiny')}")
    assert mirror.downloaded() == {"config.json", "model.safetensors", "tokenizer_config.json"}


def test_a_second_load_downloads_nothing_and_a_commit_needs_no_server(mirror):
    open_checkpoint("acme/tiny")
    before = len(mirror.requests)
    open_checkpoint("acme/tiny")
    assert not any("/resolve/" in path for _, path, _ in mirror.requests[before:])
    before = len(mirror.requests)
    open_checkpoint(f"acme/tiny@{mirror.commit('acme/tiny')}")
    # Before version 2, huggingface_hub asks for the list of files.
    assert len(mirror.requests) == before + (huggingface_hub.__version__ < "2")


def test_without_a_server_the_cached_copy_is_used(mirror, monkeypatch):
    first = open_checkpoint("acme/tiny").path
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("acme/tiny").path == first


def test_a_private_model_needs_the_token(mirror, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UserError, match="HF_TOKEN"):
        open_checkpoint("acme/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    assert open_checkpoint("acme/secret").arrays


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gogle/flan-t5-small", "google/flan-t5-small"),
        ("google/flan-t5-smal", "google/flan-t5-small"),
        ("acme/tiny@v2", "'v2'"),
        ("hf://acme/tiny/inside", "hf://owner/name"),
        ("flan-t5-small", "google/flan-t5-small"),
        ("t5x:t5_1_1_smal", "t5x:t5_1_1_small"),
        ("runs/demoo", "runs/demo"),
    ],
)
def test_wrong_names_get_the_right_one(mirror, name, fix):
    os.makedirs("runs/demo")
    with pytest.raises(UserError, match=re.escape(fix)):
        open_checkpoint(name)


def test_pickled_weights_are_refused_and_not_downloaded(mirror, model, tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (pickled / name).write_bytes((model / name).read_bytes())
    mirror.models["acme/pickled"] = pickled
    with pytest.raises(UserError, match=r"acme/pickled@refs/pr"):
        open_checkpoint("acme/pickled")
    assert mirror.downloaded() == {"config.json"}


def test_without_a_network_the_message_names_the_mirror_setting(mirror, monkeypatch):
    mirror.shutdown()
    mirror.server_close()
    with pytest.raises(UserError, match="HF_ENDPOINT") as error:
        open_checkpoint("acme/tiny")
    assert "\n" not in str(error.value)


def test_a_local_path_wins_and_its_parent_keeps_the_name_local(mirror, model):
    os.makedirs("acme")
    assert names.resolve("acme/tiny") == os.path.abspath("acme/tiny")  # a typo in a local path asks no server
    os.symlink(model, "acme/tiny")
    assert open_checkpoint("acme/tiny").path == os.path.abspath("acme/tiny")
    assert names.resolve("./acme/tiny") == os.path.abspath("acme/tiny")
    assert not mirror.requests
    assert "/snapshots/" in open_checkpoint("hf://acme/tiny").path


def test_public_checkpoints_have_short_names():
    root = "gs://t5-data/pretrained_models/t5x"
    assert names.resolve("t5x:t5_1_1_small") == f"{root}/t5_1_1_small/checkpoint_1000000"
    assert names.resolve("t5x:flan_t5_xl") == f"{root}/flan_t5_xl/checkpoint_1138000"
    assert names.public_vocabulary("t5x:byt5_base") == "bytes"
    vocabulary = "gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model"
    assert names.public_vocabulary(f"{root}/mt5_base/checkpoint_1000000") == vocabulary
    assert names.public_vocabulary("gs://mine/t5_small") is None


def test_a_mirror_has_local_copies_of_public_files(monkeypatch, tmp_path):
    url = "gs://t5-data/pretrained_models/t5x/mt5_small/checkpoint_1000000"
    local = f"{tmp_path}/t5/pretrained_models/t5x/mt5_small/checkpoint_1000000"
    monkeypatch.setenv("T5X_MIRROR", f"gs://t5-data={tmp_path}/t5/,gs://t5-data/vocabs={tmp_path}/vocabs")
    assert names.resolve("t5x:mt5_small") == names.resolve(url) == local
    assert names.public_vocabulary(url) == names.public_vocabulary(local)
    assert names.resolve("gs://t5-data-2/x") == "gs://t5-data-2/x"  # another bucket
    vocabulary = SentencePieceVocabulary(names.public_vocabulary(url))
    with pytest.raises(UserError, match=f"{tmp_path}/vocabs/mc4"):
        vocabulary.encode("a")
    file = tmp_path / "vocabs/mc4.250000.100extra/sentencepiece.model"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"not a model")
    with pytest.raises(UserError, match="not a SentencePiece model"):  # it was read
        vocabulary.encode("a")


@pytest.mark.parametrize("value", ["/data/t5", "gs://t5-data", "gs://t5-data=", "t5-data=/data/t5"])
def test_a_mirror_that_is_written_wrongly(monkeypatch, value):
    monkeypatch.setenv("T5X_MIRROR", value)
    with pytest.raises(UserError, match="T5X_MIRROR=gs://t5-data=/data/t5"):
        names.resolve("gs://t5-data/x")


@pytest.mark.slow
def test_the_commands_take_an_id_of_the_hub(mirror, model, tmp_path):
    """`t5x infer` in a process of its own, with the user's settings; then offline."""
    environment = os.environ | {"HF_ENDPOINT": mirror.url, "HF_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}

    def infer(**more):
        command = ["-m", "t5x", "infer", "--model=acme/tiny", "--input=-", "--max_length=4"]
        ran = programs.run_python(*command, input="abc\n", env=environment | more)
        ran.check_returncode()
        return json.loads(ran.stdout)["prediction"]

    expected = t5x.load(str(model)).generate("abc", max_length=4).text
    assert infer() == expected
    assert infer(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9") == expected

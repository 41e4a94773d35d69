"""What a checkpoint says of its model, and runs that would continue another one's."""

import json

import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.formats.own_checkpoint import read_description
from t5x.checkpoints.model_description import check_same_model, load_model, sidecars
from t5x.configuration import names
from t5x.data import ByteVocabulary, PassThroughVocabulary
from t5x.models import EncoderDecoderModel
from t5x.network import Transformer
from t5x.trainer.restore import RunState, restore_or_init
from tests.support import tiny

from .helpers import make_tree

BYTES, MORE, NUMBERS = ByteVocabulary(), ByteVocabulary(extra_ids=100), PassThroughVocabulary(31)


def model(inputs, targets):
    return EncoderDecoderModel(Transformer(tiny.T5_1_1), inputs, targets, None)


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(3, make_tree(3), sidecars=sidecars(model(BYTES, NUMBERS), None) | RunState(0, {}).sidecars())
    return store


@pytest.mark.parametrize(
    ("inputs", "targets", "named"),
    [(MORE, NUMBERS, "inputs"), (BYTES, MORE, "targets"), (NUMBERS, NUMBERS, "inputs")],
)
def test_a_model_dir_with_another_vocabulary_is_refused(store, inputs, targets, named):
    check_same_model(store.path(3), model(ByteVocabulary(), PassThroughVocabulary(31)), same_classes=True)
    with pytest.raises(UserError, match=f"vocabulary of {named} +checkpoint") as error:
        restore_or_init(store, None, model(inputs, targets), None, None)
    assert str(store.path(3)) in str(error.value) and "MODEL_DIR" in str(error.value)


def test_classes_that_have_moved_since_the_checkpoint_was_written_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(names._MOVED_MODULES, "t5x.old", "t5x.models")
    monkeypatch.setitem(names._MOVED_MODULES, "t5x.old_network", "t5x.network.transformer")
    current = model(BYTES, BYTES)
    files = sidecars(current, None)
    stored = json.loads(files["model.json"])
    old = {"model": stored["model"].replace("t5x.models", "t5x.old"), "network": "t5x.old_network.Transformer"}
    with CheckpointStore(tmp_path) as store:
        store.save(3, make_tree(3), sidecars=files | {"model.json": json.dumps(stored | old).encode()})
    check_same_model(store.path(3), current, same_classes=True)
    assert read_description(store.path(3)) == stored
    source = open_checkpoint(store.path(3))
    with pytest.raises(UserError, match="cannot be used"):  # make_tree has no network's shapes; its class is accepted
        load_model(source)

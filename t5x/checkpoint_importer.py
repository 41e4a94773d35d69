"""T5X's names for reading Mesh TensorFlow checkpoints; `checkpoints/formats/mesh_tensorflow.py` does it."""

# ruff: noqa: F401

import re
from collections.abc import Callable, Mapping
from typing import Any

from t5x.checkpoints import LazyArray, LazyAwaitableArray, LazyThreadPoolArray, tree
from t5x.checkpoints.formats.mesh_tensorflow import find_prefix, name_shared_biases, read_mesh_tensorflow, translate
from t5x.checkpoints.formats.tensor_bundle import read_bundle
from t5x.errors import UserError


class CheckpointTranslator:
    """Renames variables by rules.

        translator = CheckpointTranslator()

        @translator.add(r"(encoder|decoder)/embedding")
        def embeddings(opts, key, val, tower):
            return f"target/{tower}/token_embedder/embedding", val
    """

    def __init__(self):
        self._rules: list[tuple[re.Pattern[str], Callable[..., tuple[str, Any]]]] = []

    def add(self, pattern: str) -> Callable[[Callable], Callable]:
        """Return a decorator: its function gets (options, name, value, *groups of the pattern)."""

        def register(function: Callable) -> Callable:
            self._rules.append((re.compile(pattern), function))
            return function

        return register

    def apply(self, flatdict: Mapping[str, Any], **opts: Any) -> dict[str, Any]:
        """Return the variables under their new names; the first rule that matches a whole name applies."""
        renamed = {}
        for key, value in flatdict.items():
            for pattern, function in self._rules:
                if match := pattern.fullmatch(key):
                    name, new = function(opts, key, value, *match.groups())
                    renamed[name] = new
                    break
            else:
                raise UserError(f"No rule of the translator matches the variable {key!r}.")
        return renamed


t5_importer = CheckpointTranslator()


@t5_importer.add("global_step")
def global_step(opts: Any, key: str, val: Any) -> tuple[str, Any]:
    """Rename the step."""
    return "state/step", val.astype("int32") if hasattr(val, "astype") else val


_TOWER = "(encoder|decoder|transformer)"
_SLOT = "(_slot_(?:v|vr|vc))?"
_LAYER = rf"{_TOWER}/block_(\d+)/layer_\d+/"



def _rename(opts: Any, key: str, val: Any, *groups: Any, **named_groups: Any) -> tuple[str | None, Any]:
    """Rename a variable of a T5; `translate` needs only its name."""
    return translate(key), val


_ATTENTION = rf"{_LAYER}(SelfAttention|EncDecAttention)/(q|k|v|o){_SLOT}"
_NORM = rf"{_TOWER}/block_(\d+)/layer_(\d+)/(?:layer|rms)_norm/scale{_SLOT}"
shared_embeddings = t5_importer.add(rf"shared/embedding{_SLOT}")(_rename)
separate_embeddings = t5_importer.add(rf"{_TOWER}/embedding{_SLOT}")(_rename)
rel_embeddings = t5_importer.add(rf"{_LAYER}SelfAttention/relative_attention_bias{_SLOT}")(_rename)
attention_layers = t5_importer.add(_ATTENTION)(_rename)
mlpblock = t5_importer.add(rf"{_LAYER}DenseReluDense/(wi|wo)(?:_(\d+))?/kernel{_SLOT}")(_rename)
layernorms = t5_importer.add(_NORM)(_rename)
final_layernorms = t5_importer.add(rf"{_TOWER}/(?:final_layer|rms)_norm/scale{_SLOT}")(_rename)
final_logits = t5_importer.add(rf"(?:decoder|transformer)/logits/kernel{_SLOT}")(_rename)


_maybe_correct_relpos_bias = name_shared_biases  # T5X's name, to be called with the result of `t5_importer.apply`


def load_tf_ckpt(path: str) -> dict[str, LazyArray]:
    """Return the variables of a TensorFlow checkpoint under their own names, unread."""
    return dict(read_bundle(find_prefix(path)))


def restore_from_t5_checkpoint(
    state_dict: Mapping[str, Any],
    path: str,
    lazy_parameters: bool = False,
    strict: bool = True,
    translator: CheckpointTranslator | None = None,
) -> dict[str, Any]:
    """Return the state of a Mesh TensorFlow checkpoint for a model.

    Args:
      state_dict: the model's state, {"target": …, "state": …}, for its names and shapes.
      path: the checkpoint, or a directory of them.
      lazy_parameters: leave the arrays unread: `.get()` reads one.
      strict: whether variables that the model lacks are an error; otherwise they are ignored.
      translator: renames the variables, instead of the rules for T5.
    """
    stored = read_mesh_tensorflow(path).arrays if translator is None else translator.apply(load_tf_ckpt(path))
    expected = tree.flatten(state_dict)
    compared = {name: x for name, x in stored.items() if name in expected or (strict and name.startswith("target/"))}
    if table := tree.difference_by_name(expected, compared):
        fix = "\nstrict=False ignores what is unexpected." if compared.keys() - expected.keys() else ""
        raise UserError(f"{path} does not fit the model (expected: the model, found: the checkpoint): {table}{fix}")
    return tree.nest({name: stored[name] if lazy_parameters else stored[name].get() for name in expected})

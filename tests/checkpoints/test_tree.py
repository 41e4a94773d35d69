import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x._runtime.errors import UserError
from t5x.checkpoints import tree


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_flatten_and_nest_are_inverse():
    nested = {"target": {"encoder": {"scale": 1}, "layers_0": {"kernel": 2}}, "state": {"step": 3}}
    flat = tree.flatten(nested)
    assert flat == {"state/step": 3, "target/encoder/scale": 1, "target/layers_0/kernel": 2}
    assert tree.nest(flat) == nested


def test_tuples_are_named_by_position():
    assert tree.flatten({"opt": ({"mu": 1}, 2)}) == {"opt/0/mu": 1, "opt/1": 2}


@pytest.mark.parametrize("bad", [{"a/b": 1}, {"a": {"": 1}}])
def test_keys_that_cannot_be_names_are_refused(bad):
    with pytest.raises(UserError, match="contains '/'"):
        tree.flatten(bad)


def test_equal_trees_have_no_difference():
    assert tree.difference({"a": zeros(2)}, {"a": jax.ShapeDtypeStruct((2,), "float32")}) == ""


def test_difference_names_missing_unexpected_and_reshaped():
    expected = {"encoder": {"bias": zeros(8), "kernel": zeros(8, 16)}, "same": zeros()}
    found = {"encoder": {"kernel": zeros(8, 32), "scale": zeros(4)}, "same": zeros()}
    table = tree.difference(expected, found)
    assert table.startswith("1 missing, 1 unexpected, 1 of another shape:")
    assert [" ".join(line.split()) for line in table.splitlines()[1:]] == [
        "expected found",
        "missing encoder/bias [8] -",
        "unexpected encoder/scale - [4]",
        "shape encoder/kernel [8, 16] [8, 32]",
    ]


def test_long_difference_is_cut_and_counted():
    expected = {f"layers_{i}": zeros(1) for i in range(30)}
    found = {f"blocks_{i}": zeros(1) for i in range(5)}
    lines = tree.difference(expected, found).splitlines()
    assert lines[0] == "30 missing, 5 unexpected:"
    assert len(lines) == 2 + 20 + 1
    assert lines[-1].strip() == "… and 15 more (10 missing, 5 unexpected)"


def test_parameter_table_shows_axes_specs_total_and_optimizer():
    params = {"mlp": {"wo": {"kernel": zeros(64, 8)}}, "norm": {"scale": zeros(8)}}
    axes = {"mlp": {"wo": {"kernel": ("mlp", "embed")}}, "norm": {"scale": ("embed",)}}
    specs = {"mlp": {"wo": {"kernel": PartitionSpec("model", None)}}, "norm": {"scale": PartitionSpec(None)}}
    lines = tree.parameter_table(params, axes, specs, optimizer_state={"mlp": {"v_row": zeros(64)}})
    assert [" ".join(line.split()) for line in lines if line] == [
        "Variable mlp/wo/kernel size 512 shape (mlp=64, embed=8) partition spec ('model', None)",
        "Variable norm/scale size 8 shape (embed=8) partition spec (None,)",
        "Total number of parameters: 520",
        "Optimizer state:",
        "Variable mlp/v_row size 64 shape (64) partition spec None",
        "Total size of the optimizer state: 64",
    ]


def test_parameter_table_takes_shardings_and_scalars():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    specs = {"scale": NamedSharding(mesh, PartitionSpec("data"))}
    lines = tree.parameter_table({"scale": zeros(4), "step": zeros()}, {"step": ()}, specs)
    assert lines[0].endswith("shape (4)  partition spec ('data',)")
    assert "size 1  shape ()" in lines[1]
    assert lines[-1] == "Total number of parameters: 5"


def test_axes_that_do_not_fit_the_shape_are_an_error():
    with pytest.raises(ValueError, match="norm"):
        tree.parameter_table({"norm": zeros(8)}, {"norm": ("embed", "mlp")}, {})

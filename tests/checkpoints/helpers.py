"""Small trees with the names, dtypes and odd shapes of real checkpoints, as a pure function of the step."""

import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.programs import environment, start_python

PROGRAMS = Path(__file__).parent / "programs"
SIDECARS = {"model.json": b'{"emb_dim": 8}', "dataset/train-000-of-001.json": b"{}", "vocabulary/inputs/a.txt": b"abc"}


def make_tree(step: int, *, rows: int = 16):
    """{"target", "state"} with float32, bfloat16, int32 scalars and arrays of 0 and 1 elements."""
    rng = np.random.default_rng(step)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    kernel = normal(rows, 8)
    return {
        "target": {
            "token_embedder": {"embedding": normal(32, 8, dtype=jnp.bfloat16)},
            "encoder": {
                "layers_0": {"mlp": {"wi_0": {"kernel": kernel}, "wo": {"kernel": normal(8, rows)}}},
                "encoder_norm": {"scale": normal(8)},
            },
            "unused": {"table": jnp.zeros((0, 8), jnp.bfloat16)},
        },
        "state": {
            "step": jnp.asarray(step, jnp.int32),
            "param_states": {"encoder": {"m": jnp.zeros((1,)), "v": normal(rows, 8), "v_row": normal(rows)}},
        },
    }


def abstract(tree, sharding=None):
    """Shapes and dtypes of `tree`, all with one sharding (None: NumPy arrays)."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def assert_same(expected, found):
    """Same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for want, have in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        want, have = np.asarray(want), np.asarray(have)
        assert want.dtype == have.dtype
        assert want.shape == have.shape
        assert want.tobytes() == have.tobytes()


def names(directory) -> set[str]:
    """What lies directly in a directory."""
    return set(os.listdir(directory))


def start_program(name: str, *arguments, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Starts one of the programs beside the tests, its output piped."""
    return start_python(
        "-u",
        PROGRAMS / name,
        *map(str, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**{"JAX_PLATFORMS": "cpu", **(env or {})}),
    )

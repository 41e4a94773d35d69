"""TPUs: the bias of attention by matmuls, and our fused attention on request."""

import importlib

import jax

from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.ops import Ops, Shaped, compiler_refuses, shape_refuses
from t5x.partitioning.devices import vmem_bytes


class TpuOps(Ops):
    """TPUs."""

    @property
    def flash_target(self) -> str:
        return "tpu"

    def bias_matrix(self, bias: RelativeBias, q_length: int, k_length: int) -> jax.Array:
        # TPUs would move every row between lanes. They multiply by one-hot buckets, computed where they are needed.
        return bias.matrix_by_matmul(q_length, k_length)

    def refuses(
        self, backend: str, query: Shaped, key: Shaped, mask: Mask, softcap: float | None = None
    ) -> str | None:
        if backend != "pallas":
            return super().refuses(backend, query, key, mask, softcap)
        if reason := shape_refuses(query, mask, ("bfloat16",)) or compiler_refuses("tpu"):
            return reason
        flash = importlib.import_module("t5x.network.flash_attention")
        needed, available = flash.tpu_memory(query.shape, key.shape), vmem_bytes()
        if needed > available:
            lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
            return f"rows of {lengths} need {needed >> 20} MB of vector memory (this TPU has {available >> 20})"
        return None

"""TPUs: the bias of attention by matmuls, and our fused attention on request."""

import importlib

from t5x.kernels.ops import Ops, compiler_refuses, shape_refuses
from t5x.partitioning.devices import vmem_bytes


class TpuOps(Ops):
    """TPUs."""

    flash_target = "tpu"

    def bias_matrix(self, bias, q_length, k_length):
        # TPUs would move every row between lanes. They multiply by one-hot buckets, computed where they are needed.
        return bias.matrix_by_matmul(q_length, k_length)

    def refuses(self, backend, query, key, mask, softcap=None):
        if backend != "pallas":
            return super().refuses(backend, query, key, mask, softcap)
        if reason := shape_refuses(query, mask, ("bfloat16",)) or compiler_refuses("tpu"):
            return reason
        flash = importlib.import_module("t5x.kernels.flash_attention")
        needed, available = flash.tpu_memory(query.shape, key.shape), vmem_bytes()
        if needed > available:
            lengths = f"{query.shape[1]} queries and {key.shape[1]} keys"
            return f"rows of {lengths} need {needed >> 20} MB of vector memory (this TPU has {available >> 20})"
        return None

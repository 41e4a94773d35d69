"""XLA flags of the programs that tests run: they compile much and compute little."""

from jaxlib.version import __version_info__ as _jaxlib

QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if _jaxlib < (0, 11):  # later ones abort at a flag that they do not know
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"

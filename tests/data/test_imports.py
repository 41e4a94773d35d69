import subprocess
import sys


def test_importing_the_package_needs_neither_jax_nor_tensorflow():
    heavy = ["jax", "flax", "tensorflow", "grain", "sentencepiece"]
    code = f"import sys, t5x.data; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""

"""How much memory `t5x convert` takes, and how fast it is, between all formats.

    python benchmarks/convert_memory.py --size large --directory /scratch

Makes a random float32 checkpoint of a T5 1.1 of the given size, converts it in a process of its own, samples that
process's anonymous resident memory (RssAnon, which file pages are no part of) every 50 ms, and subtracts what it had
after its imports. The native form with scanned layers is that of a model with the biases of umT5. A large model takes
about 15 GB of disk. Its peaks must stay below 1.5 GB; they were 150 to 740 MB: an array, or a stack of layers
(277 MB), and copies of it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from t5x.checkpoints import families
from t5x.checkpoints.formats.huggingface import write_huggingface
from t5x.checkpoints.formats.source import LazyArray

SIZES = {  # emb_dim, num_heads, head_dim, mlp_dim, layers
    "tiny": (8, 4, 3, 16, 2),
    "small": (512, 6, 64, 1024, 8),
    "base": (768, 12, 64, 2048, 12),
    "large": (1024, 16, 64, 2816, 24),
}
FORMS = {  # --to, --layers
    "hf": ("hf", "unrolled"),
    "t5x": ("t5x", "unrolled"),
    "native": ("native", "unrolled"),
    "t5x-scanned": ("t5x", "scanned"),
    "native-scanned": ("native", "scanned"),
}
SECONDS_BETWEEN_SAMPLES = 0.05

CHILD = """
import sys
import jax, orbax.checkpoint, tensorstore
from t5x.checkpoints import convert
from t5x.checkpoints.formats import huggingface, mesh_tensorflow, native_t5x, open_checkpoint, orbax, own_checkpoint
from t5x.cli.verbs import inspect
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2]:
    convert.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], layers=sys.argv[4])
else:
    source = open_checkpoint(sys.argv[1])
    print(inspect.params_sha256(inspect.canonical_params(source)), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--formats", default=",".join(FORMS), help="sources and destinations, with commas between them")
    parser.add_argument("--directory", help="directory for the temporary checkpoints (default: the system's)")
    args = parser.parse_args()
    forms = args.formats.split(",")
    if unknown := set(forms) - FORMS.keys():
        parser.error(f"--formats: {', '.join(sorted(unknown))} is not one of {', '.join(FORMS)}")
    work = Path(tempfile.mkdtemp(prefix="convert_memory_", dir=args.directory))
    try:
        rows = measure(work, args.size, forms)
    finally:
        shutil.rmtree(work)
    print(json.dumps({"size": args.size, "rows": rows}))


def measure(work: Path, size: str, forms: list[str]) -> list[dict]:
    """Print a row for each pair of source and destination, and one for the hash of each source."""
    make_checkpoint(work / "made-shared", size, per_layer_bias=False)
    make_checkpoint(work / "made-per-layer", size, per_layer_bias=True)
    print(f"{'source':<15}{'destination':<16}{'seconds':>8}{'MB/s':>8}{'peak MB':>9}", flush=True)
    rows = []
    for source in forms:
        # scalable_t5 has a bias in every layer: what becomes of such a source, or is to become one, is a model like it.
        for checkpoint in ("made-shared", "made-per-layer"):
            destinations = [d for d in forms if ("native-scanned" in (source, d)) == (checkpoint == "made-per-layer")]
            if not destinations:
                continue
            start = work / "source"
            if source == "hf":
                start.symlink_to(work / checkpoint)
            else:
                run(work / checkpoint, start, *FORMS[source])
            megabytes = tree_size(work / checkpoint) / 1e6
            for destination in [*destinations, None]:
                to, layers = FORMS[destination] if destination else ("", "")
                end = work / "destination" if destination else ""
                seconds, peak = run(start, end, to, layers)
                row = {"source": source, "destination": destination or "(hash)", "seconds": round(seconds, 1)}
                row |= {"mb_per_s": round(megabytes / seconds), "peak_mb": round(peak / 1e6)}
                values = (f"{row['seconds']:>8}", f"{row['mb_per_s']:>8}", f"{row['peak_mb']:>9}")
                print(f"{source:<15}{row['destination']:<16}{''.join(values)}", flush=True)
                rows.append(row)
                if destination:
                    shutil.rmtree(end)
            if start.is_symlink():
                start.unlink()
            else:
                shutil.rmtree(start)
    return rows


def make_checkpoint(path: Path, size: str, *, per_layer_bias: bool) -> None:
    """Write a Hugging Face directory of random weights, array by array."""
    emb_dim, num_heads, head_dim, mlp_dim, layers = SIZES[size]
    config = {
        "vocab_size": 32128, "emb_dim": emb_dim, "num_heads": num_heads, "head_dim": head_dim, "mlp_dim": mlp_dim,
        "num_encoder_layers": layers, "num_decoder_layers": layers, "mlp_activations": ("gelu", "linear"),
        "logits_via_embedding": False, "per_layer_relative_position_bias": per_layer_bias,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = {
        p.name: LazyArray(p.shape, np.dtype(np.float32), lambda p=p: rng.standard_normal(p.shape, np.float32))
        for p in families.t5_parameters(config)
    }
    write_huggingface(path, config, arrays)


def run(source: Path, destination: Path | str, to: str, layers: str) -> tuple[float, int]:
    """Convert (without a destination, hash) and return seconds and the peak of anonymous memory beyond the imports."""
    command = [sys.executable, "-c", CHILD, str(source), str(destination), to, layers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.readline()
        base = peak = anonymous_memory(child.pid)
        start = time.monotonic()
        child.stdin.write(b"\n")
        child.stdin.close()
        while child.poll() is None:
            peak = max(peak, anonymous_memory(child.pid))
            time.sleep(SECONDS_BETWEEN_SAMPLES)
        seconds = time.monotonic() - start
        if child.returncode:
            raise SystemExit(child.stderr.read().decode())
    return seconds, peak - base


def anonymous_memory(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), 0)
    except OSError:  # it has just ended
        return 0


def tree_size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()

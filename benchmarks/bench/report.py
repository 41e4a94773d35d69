"""Results as text."""

from collections.abc import Callable, Mapping
from typing import Any

Result = Mapping[str, Any]


def table(result: Result) -> str:
    """Return an aligned table of a result, one measurement per line."""
    lines = _LINES.get(result["work"], _compute)(result)
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def rounded(result: Result) -> dict[str, Any]:
    """Return the result with six significant digits.

    >>> rounded({"step_ms": 12.345678, "batch": 8, "tokens_per_s": 123456.789, "device": "cpu"})
    {'step_ms': 12.3457, 'batch': 8, 'tokens_per_s': 123457.0, 'device': 'cpu'}
    """
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in result.items()}


Lines = list[tuple[str, str]]


def _model(r: Result) -> Lines:
    out = {"score": "two logits", "encode": "encoded"}.get(r["work"], f"{r['targets']} out")
    extras = [
        text
        for there, text in (
            (r.get("beams", 1) > 1, f"{r.get('beams')} beams"),
            (r.get("packed"), f"{r.get('packed')} examples per row"),
            (r.get("dropout"), f"dropout {r.get('dropout')}"),
            (r.get("remat", "none") != "none", f"remat {r.get('remat')}"),
            (r.get("microbatches", 1) > 1, f"{r.get('microbatches')} microbatches"),
            (r["scan"], "scanned layers"),
        )
        if there
    ]
    return [
        (r["work"], f"T5 1.1 {r['size']}, {r['parameters'] / 1e6:.4g} million parameters"),
        ("batch", ", ".join([f"{r['batch']} rows, {r['inputs']} in, {out}", *extras])),
        ("device", f"{r['devices']} x {r['device']}, JAX {r['jax']}"),
        ("numerics", f"{r['dtype']}{', fp8 matmuls' if r.get('matmul') else ''}, attention {r['attention']}"),
    ]


def _compute(r: Result) -> Lines:
    return [
        *_model(r),
        _step(r),
        ("speed", f"{r['sequences_per_s']:,.4g} sequences/s, {r['tokens_per_s']:,.0f} tokens/s"),
        ("TFLOP/s", f"{r['tflop_per_s']:.4g}, {100 * r['matmul_share']:.1f} % of a large matmul's "
                    f"{r['matmul_tflop_per_s']:.4g}"),
        ("memory", f"{r['peak_memory_gb']:.3g} GB at most ({r['peak_memory_of']})"),
        ("compiling", f"{r['compile_s']:.3g} s{' (from the cache)' if r['compile_cached'] else ''}"),
    ]  # fmt: skip


def _data(r: Result) -> Lines:
    return [
        ("data", f"{r['source']}"),
        ("batch", f"{r['batch']} rows, {r['inputs']} in, {r['targets']} out{', packed' if r['packed'] else ''}"),
        ("device", f"{r['device']}, {r['workers']} worker processes"),
        _step(r),
        ("speed", f"{r['examples_per_s']:,.5g} examples/s, {r['tokens_per_s']:,.0f} tokens/s without padding"),
        ("padding", f"{100 * r['padding_share']:.1f} % of the positions"),
        ("first batch", f"after {r['first_batch_s']:.3g} s"),
    ]  # fmt: skip


def _checkpoint(r: Result) -> Lines:
    return [
        *_model(r),
        ("size", f"{r['checkpoint_gb']:.3g} GB"),
        ("save", f"blocked training for {1e3 * r['save_blocking_s']:.3g} ms, complete after {r['save_done_s']:.3g} s"),
        ("steps", f"{r['step_ms']:.4g} ms, around a save {r['step_ms_around_save']:.4g}: "
                  f"{r['save_overhead_percent']} % more"),
        ("restore", f"{r['restore_s']:.3g} s, {r['restore_gb_per_s']:.3g} GB/s, "
                    f"{r['restore_to_read_ratio']} of the disk's {r['cold_read_gb_per_s']:.3g}"),
    ]  # fmt: skip


def _step(r: Result) -> tuple[str, str]:
    times = f"{r['step_ms']:.4g} ms"
    if "step_ms_min" in r:
        times += f", at best {r['step_ms_min']:.4g}, 80 % within {r['step_ms_spread']:.3g}"
    return "step", f"{times}; {r['steps']} steps"


_LINES: dict[str, Callable[[Result], Lines]] = {"data": _data, "checkpoint": _checkpoint}

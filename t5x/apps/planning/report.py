"""Report a plan as text and as JSON."""

from typing import Any

from t5x.apps.planning import memory
from t5x.apps.planning.estimates import ASSUMPTIONS, GIGA, USABLE, Estimate, PlannedRun, layout_of, share_of
from t5x.network.config import REMAT_POLICIES
from t5x.telemetry.devices import Topology

HOUR = 3600


def recommend(estimates: list[Estimate], topology: Topology, remat: str) -> tuple[Estimate | None, str]:
    """Return the fastest estimate that fits, and its remat policy.

    If none fits, more is recomputed. The estimate is None if nothing helps.
    """
    for policy in REMAT_POLICIES[REMAT_POLICIES.index(remat) :]:
        fitting = [estimate for estimate in estimates if fits(estimate.peak(policy), topology)]
        if fitting:
            return min(fitting, key=lambda estimate: estimate.seconds(policy)), policy
    return None, remat


def fits(peak: float, topology: Topology) -> bool:
    return peak <= USABLE * topology.chip.memory * GIGA


def gin_lines(run: PlannedRun, estimate: Estimate, remat: str) -> list[str]:
    """Return the gin statements of an estimate."""
    lines = [f"partitioning.PjitPartitioner.preset = '{estimate.preset}'"]
    if estimate.mesh[1] > 1:
        lines.append(f"partitioning.PjitPartitioner.num_partitions = {estimate.mesh[1]}")
    if remat != run.config.remat_policy:
        lines.append(f"network.{type(run.config).__name__}.remat_policy = '{remat}'")
    return lines


def as_json(
    run: PlannedRun,
    topology: Topology,
    estimates: list[Estimate],
    skipped: dict[str, str],
    steps: int | None,
    price: float | None,
) -> dict[str, Any]:
    """Return the plan as a JSON object: gigabytes per device, and milliseconds.

    Args:
      estimates: an estimate for each preset.
      skipped: {preset: why it cannot be used}.
      steps: of the whole run, for its time.
      price: of one device for one hour.
    """
    chosen, remat = recommend(estimates, topology, run.config.remat_policy)
    shown = chosen or min(estimates, key=lambda estimate: estimate.peak("full"))
    remat = remat if chosen else "full"
    seconds = shown.seconds(remat)
    cache = memory.cache_bytes(run.config, share_of(run, topology, shown.mesh))
    plan: dict[str, Any] = {
        "topology": topology.name, "device": topology.kind, "devices": topology.devices,
        "memory_gb": topology.chip.memory, "parameters": layout_of(run, "dp", 1).num_params,
        "batch": run.batch, "inputs": run.inputs, "targets": run.targets,
        "microbatches": run.microbatches, "dtype": run.config.dtype, "remat": remat,
        "fits": chosen is not None, "preset": chosen.preset if chosen else None,
        "mesh": dict(zip(("data", "model"), shown.mesh, strict=True)),
        "gin": gin_lines(run, chosen, remat) if chosen else [],
        "peak_memory_gb": shown.peak(remat) / GIGA, "step_ms": 1e3 * seconds,
        "sequences_per_s": run.batch / seconds, "kv_cache_gb": cache / GIGA,
        "presets": {estimate.preset: _preset(estimate, topology) for estimate in estimates}, "skipped": skipped,
        "assumptions": ASSUMPTIONS,
    }  # fmt: skip
    if steps:
        plan |= {"steps": steps, "hours": steps * seconds / HOUR}
        if price is not None:
            plan["cost"] = plan["hours"] * topology.devices * price
    return plan


def _preset(estimate: Estimate, topology: Topology) -> dict[str, Any]:
    compiled = estimate.compiled
    return {
        "mesh": dict(zip(("data", "model"), estimate.mesh, strict=True)),
        "fits": {remat: fits(estimate.peak(remat), topology) for remat in REMAT_POLICIES},
        "peak_memory_gb": {remat: estimate.peak(remat) / GIGA for remat in REMAT_POLICIES},
        "memory_gb": {
            remat: {kind: size / GIGA for kind, size in sizes.items()} for remat, sizes in estimate.memory.items()
        },
        "step_ms": {
            remat: {part: 1e3 * seconds for part, seconds in times.items()} for remat, times in estimate.step.items()
        },
        "collectives": compiled.counts(),
        "traffic_gb": sum(collective.traffic for collective in compiled.collectives) / GIGA,
        "xla_cpu": {"arguments_gb": compiled.arguments / GIGA, "temporaries_gb": compiled.temporaries / GIGA},
    }


def as_text(plan: dict[str, Any], topology: Topology) -> str:
    """Return the plan as a text to read."""
    lines = [
        f"model     {plan['parameters'] / 1e6:,.4g} million parameters, {plan['dtype']}, batch {plan['batch']}, "
        f"{plan['inputs']} in, {plan['targets']} out"
        + (f", {plan['microbatches']} microbatches" if plan["microbatches"] > 1 else ""),
        f"devices   {topology}", "",
        f"{'preset':<8}{'data x model':<14}{'peak GB with remat':<28}{'step':>10}   collectives in a step",
        f"{'':<22}" + "".join(f"{remat:<9}" for remat in REMAT_POLICIES),
    ]  # fmt: skip
    for name, preset in plan["presets"].items():
        cells = [f"{preset['peak_memory_gb'][r]:.3g}{'' if preset['fits'][r] else ' !'}" for r in REMAT_POLICIES]
        peaks = "".join(f"{cell:<9}" for cell in cells)
        counts = ", ".join(f"{count} {kind}" for kind, count in preset["collectives"].items()) or "none"
        mesh = f"{preset['mesh']['data']} x {preset['mesh']['model']}"
        step = sum(preset["step_ms"][plan["remat"]].values())
        lines.append(f"{name:<8}{mesh:<14}{peaks:<28}{step:>7.4g} ms   {counts}")
    lines += [f"{name:<8}not possible: {why}" for name, why in plan["skipped"].items()]
    if not plan["fits"]:
        return "\n".join([
            *lines, "",
            "Nothing fits (! needs more memory than the device has). Use more or larger devices, a smaller batch or "
            "more microbatches.",
        ])  # fmt: skip
    chosen = plan["presets"][plan["preset"]]
    kinds = ", ".join(f"{kind} {size:.3g}" for kind, size in chosen["memory_gb"][plan["remat"]].items() if size > 0.005)
    times = ", ".join(f"{part} {ms:.3g}" for part, ms in chosen["step_ms"][plan["remat"]].items() if ms > 0.05)
    lines += [
        "", f"use       {plan['preset']}, remat {plan['remat']}",
        *(f"          {line}" for line in plan["gin"]),
        f"memory    {plan['peak_memory_gb']:.3g} of {topology.chip.memory:g} GB per device: {kinds}",
        f"          decoding this batch keeps {plan['kv_cache_gb']:.3g} GB of keys and values",
        f"step      {plan['step_ms']:.4g} ms, {plan['sequences_per_s']:,.4g} sequences/s: {times}",
    ]  # fmt: skip
    if "hours" in plan:
        cost = f", {plan['cost']:,.0f} in the currency of --price" if "cost" in plan else ""
        lines.append(f"run       {plan['steps']:,} steps in {plan['hours']:,.3g} hours{cost}")
    if not topology.is_tpu and plan["peak_memory_gb"] > 0.75 * topology.chip.memory:
        lines.append(f"note      JAX takes 75 % of a GPU's memory: set XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}")
    return "\n".join([*lines, "", f"Assumed: {plan['assumptions']}."])

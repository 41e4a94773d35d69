"""The verb `t5x plan`: its arguments, and the start of JAX with virtual devices."""

import argparse
import dataclasses
import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from t5x._runtime.errors import UserError, check_at_least
from t5x._runtime.signals import work_begins
from t5x.cli.options import add_gin_files, given_options, parse_gin
from t5x.cli.parser import VerbParser
from t5x.telemetry.devices import Topology, parse_topology

if TYPE_CHECKING:
    from t5x.apps.planning.estimates import PlannedRun

_SIZES = ("tiny", "small", "base", "large", "xl", "xxl")  # as in `estimates`, which imports JAX
_NUMBERS = ("batch", "inputs", "targets", "microbatches")
_SIZE_OPTIONS = (*_NUMBERS, "dtype", "remat", "scan")


def define(parser: VerbParser) -> None:
    parser.add_argument("--topology", required=True, metavar="NAME", help="v4-32, v5e-16, h200x8, a100x64, …")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the run, for its time (gin: TRAIN_STEPS)")
    parser.add_argument("--price", type=float, metavar="X", help="of one device for an hour, for the cost")
    parser.add_argument("--preset", choices=("dp", "fsdp", "tp", "2d"), help="plan only this preset")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    model = parser.add_argument_group("a model without gin files")
    model.add_argument("--size", choices=_SIZES, help="T5 1.1 of this size, trained with Adafactor")
    model.add_argument("--batch", type=int, metavar="N", help="rows per step (128)")
    model.add_argument("--inputs", type=int, metavar="N", help="input tokens per row (512)")
    model.add_argument("--targets", type=int, metavar="N", help="target tokens per row (128)")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the activations (bfloat16)")
    model.add_argument("--remat", choices=("minimal", "full"), help="recompute in the backward pass (nothing)")
    model.add_argument("--microbatches", type=int, metavar="N", help="microbatches of a step (1)")
    model.add_argument("--scan", action="store_true", default=None, help="scan over stacked layers")
    add_gin_files(parser)
    parser.set_help(
        "Estimate memory, step time and cost of training on devices that are not here, and recommend a mesh. With gin "
        "files, take the options of `t5x train`.",
        """
        t5x plan --size xxl --batch 256 --topology v5p-64 --remat full --scan
        t5x plan --size base --topology h200x1 --steps 100000 --price 3.5
        t5x plan --gin_file=t5x/examples/demo/dates.gin --gin.MODEL_DIR=runs/dates --topology v5e-8
        """,
    )


def run(args: argparse.Namespace) -> None:
    topology = parse_topology(args.topology)
    uses_gin = bool(args.gin_file or args.gin_bindings)
    if uses_gin == bool(args.size):
        raise UserError("`t5x plan` needs either --size or gin files, as `t5x train` takes them.")
    if uses_gin and (unused := given_options(args, _SIZE_OPTIONS)):
        raise UserError(f"--{next(iter(unused))} belongs to --size: set it with --gin.NAME=VALUE, as for `t5x train`.")
    check_at_least(1, "--", **{name: getattr(args, name) for name in (*_NUMBERS, "steps")})
    _start_jax(topology.devices)
    work_begins()
    planned, steps = _read_gin(args) if uses_gin else (_build_run(args), args.steps)
    plan, text = _plan(planned, topology, args, steps)
    print(json.dumps(plan) if args.json else text, flush=True)


def _start_jax(devices: int) -> None:
    """Start JAX with virtual CPU devices. This works only before anything else has started it."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The program is compiled to be read, not to run.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    import jax

    if jax.device_count() != devices:
        raise UserError(f"t5x plan needs its own process: JAX has already started with {jax.device_count()} devices.")


def _build_run(args: argparse.Namespace) -> "PlannedRun":
    from t5x.apps.planning.estimates import SIZES, PlannedRun, t5_1_1

    config = dataclasses.replace(
        SIZES[args.size], dtype=args.dtype or "bfloat16", remat_policy=args.remat or "none", scan_layers=bool(args.scan)
    )
    return PlannedRun(t5_1_1(config), **{"batch": 128, "inputs": 512, "targets": 128} | given_options(args, _NUMBERS))


def _read_gin(args: argparse.Namespace) -> tuple["PlannedRun", int | None]:
    """Return the run that the gin files configure, and its number of steps."""
    from t5x import configuration
    from t5x.apps.planning.estimates import PlannedRun
    from t5x.runs.train import train

    bound: dict[str, Any] = {}

    @functools.wraps(train)
    def capture(*, model: Any, train_dataset_cfg: Any, **arguments: Any) -> None:
        bound.update(arguments, model=model, data=train_dataset_cfg)

    parse_gin(args, [capture])
    configuration.check(capture)
    configuration.configured(capture)()
    data, lengths = bound["data"], bound["data"].task_feature_lengths
    microbatches = next(
        (value for name, value in configuration.bindings().items() if name.endswith("Trainer.num_microbatches")), "1"
    )
    if "encoder_input_tokens" in bound["model"].input_shapes(lengths):
        inputs, targets = lengths["inputs"], lengths["targets"]
    else:  # a decoder-only model has both in one row
        inputs, targets = 0, sum(lengths.values())
    count = int(microbatches) if microbatches.isdigit() else 1
    planned = PlannedRun(bound["model"], data.batch_size, inputs, targets, count)
    return planned, args.steps or bound.get("total_steps")


def _plan(
    planned: "PlannedRun", topology: Topology, args: argparse.Namespace, steps: int | None
) -> tuple[dict[str, Any], str]:
    """Return the plan as JSON and as text."""
    from t5x.apps.planning import estimates, report

    candidates, skipped = [], {}
    for preset, mesh in estimates.meshes(planned, topology).items():
        if args.preset not in (None, preset):
            continue
        if isinstance(mesh, str):
            skipped[preset] = mesh
            continue
        print(f"compiling {preset} for {mesh[0]} x {mesh[1]} virtual devices …", file=sys.stderr, flush=True)
        candidates.append(estimates.estimate(planned, topology, preset, mesh))
    if not candidates:
        reasons = "; ".join(f"{preset}: {why}" for preset, why in skipped.items()) or f"no preset {args.preset}"
        raise UserError(f"No mesh fits {topology.name} and this batch ({reasons}). Change --batch or --topology.")
    plan = report.as_json(planned, topology, candidates, skipped, steps, args.price)
    return plan, report.as_text(plan, topology)

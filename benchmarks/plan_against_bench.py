"""Compare `t5x plan` with `benchmarks.bench` on the devices of this machine.

    python benchmarks/plan_against_bench.py --topology h200x1

Each work is SIZE:BATCH[:OPTION…], where an option is `full`, `minimal` or `scan`. The exit status is 1 if a peak memory
differs by more than 10 %, or a step time by more than 25 %.
"""

import argparse
import sys

import rounds

MEMORY, TIME = 0.10, 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200x1", help="this machine, as `t5x plan` names it")
    parser.add_argument("--work", default="base:128,large:64,xl:64,xl:64:full:scan", help="comma-separated")
    args = parser.parse_args()
    print("| work | peak GB, plan | bench | | step ms, plan | bench | |\n|---|---|---|---|---|---|---|")
    bad, start = 0, [sys.executable, "-m"]
    for work in args.work.split(","):
        size, batch, *others = work.split(":")
        options = ["--size", size, "--batch", batch, "--inputs", "512", "--targets", "128", "--dtype", "bfloat16"]
        for other in others:
            options += ["--scan"] if other == "scan" else ["--remat", other]
        plan = rounds.run([*start, "t5x", "plan", "--json", *options, "--topology", args.topology, "--preset", "dp"])
        bench = rounds.run([*start, "benchmarks.bench", "train", "--json", *options])
        cells = []
        for name, limit in (("peak_memory_gb", MEMORY), ("step_ms", TIME)):
            difference = plan[name] / bench[name] - 1
            bad += abs(difference) > limit
            cells += [f"{plan[name]:.4g}", f"{bench[name]:.4g}", f"{100 * difference:+.1f} %"]
        print(f"| {work} | {' | '.join(cells)} |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""The verb `t5x doctor`: its arguments, the order of the checks, and their output."""

import argparse
import json
import textwrap
from collections.abc import Iterator

from t5x._runtime.errors import UserError
from t5x._runtime.signals import work_begins
from t5x.apps.doctor.checks import TOPICS, Finding, error
from t5x.cli.options import add_processes
from t5x.cli.parser import VerbParser


class NotReady(Exception):
    """Raised when a check found an error."""

    exit_code = 1


def define(parser: VerbParser) -> None:
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"{', '.join(TOPICS)} (default: all)")
    parser.add_argument(
        "--path", default=".", metavar="DIR", help="where runs are written: a directory, gs://…, s3://…"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_processes(parser)
    parser.set_help(
        "Check whether this machine is ready: software, devices, several processes, storage. Every problem comes with "
        "its fix. The exit status is 1 if there is an error.",
        """
        t5x doctor
        t5x doctor --path gs://bucket/runs
        t5x doctor network --coordinator_address node1:12345 --process_count 2 --process_index 0
        """,
    )


def run(args: argparse.Namespace) -> None:
    if unknown := [topic for topic in args.topics if topic not in TOPICS]:
        raise UserError(f"`t5x doctor` has no topic {unknown[0]!r}; topics: {', '.join(TOPICS)}.")
    work_begins()
    reported: list[dict[str, str]] = []
    for topic in args.topics or TOPICS:
        if not args.json:
            print(topic, flush=True)
        for finding in _findings(topic, args):
            reported.append({"topic": topic, **finding._asdict()})
            if not args.json:
                print(_text(finding), flush=True)
    counts = {status: sum(finding["status"] == status for finding in reported) for status in ("ok", "warning", "error")}
    if args.json:
        print(json.dumps({"ready": not counts["error"], **counts, "findings": reported}), flush=True)
    summary = f"{counts['error']} error(s), {counts['warning']} warning(s)"
    if counts["error"]:
        raise NotReady(f"This machine is not ready: {summary}.")
    if not args.json:
        print(f"Ready: {summary}.")


def _findings(topic: str, args: argparse.Namespace) -> Iterator[Finding]:
    """Run the checks of a topic. A check that raises becomes a finding."""
    try:
        yield from TOPICS[topic](args)
    except Exception as problem:
        reason = (str(problem).splitlines() or [""])[0]
        yield error(
            f"The check of {topic} failed: {type(problem).__name__}: {reason}",
            f"`t5x doctor {topic} --debug` logs more. If the machine is fine, report it.",
        )


def _text(finding: Finding) -> str:
    mark = {"ok": "  ok       ", "warning": "  WARNING  ", "error": "  ERROR    "}[finding.status]
    wrap = textwrap.TextWrapper(110, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False)
    lines = [wrap.fill(finding.message)]
    if finding.fix:
        wrap.initial_indent = " " * len(mark) + "fix: "
        lines.append(wrap.fill(finding.fix))
    return "\n".join(lines)

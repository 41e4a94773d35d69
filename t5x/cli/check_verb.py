"""`t5x check`: report what is wrong with gin files, and run nothing."""

import argparse
import pkgutil

from t5x.cli.options import add_gin, parse_gin
from t5x.cli.parser import VerbParser
from t5x.cli.verbs import GIN_ENTRY_POINTS


def define(parser: VerbParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="gin files, read in this order")
    add_gin(parser)
    parser.set_help(
        "Report every error and warning in gin files without running them. The exit status is 0 if there is no error, "
        "else 2. A file that configures no entry point (train, evaluate, infer, …), such as one of a model, is "
        "checked by itself: macros that other files define may be missing.",
        """
        t5x check my_run.gin --gin.MODEL_DIR=runs/mine
        t5x check t5x/examples/t5/t5_1_1/base.gin --strict
        """,
    )


def run(args: argparse.Namespace) -> None:
    from t5x import configuration

    args.gin_file = [*args.files, *args.gin_file]
    parse_gin(args, [pkgutil.resolve_name(name) for name in GIN_ENTRY_POINTS.values()])
    entries = configuration.entry_points_in_use()
    for entry in entries:
        configuration.check(entry, strict=args.strict)
    if args.dry_run:
        print(configuration.resolved_str())
    what = " and ".join(f"`{entry.__name__}`" for entry in entries)
    print(f"no errors: {what or 'an incomplete configuration, for other files to include,'} can be read")

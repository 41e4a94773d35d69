"""The `t5x` command: one sub-command a verb, each a few lines over an entry point.

Nothing here imports JAX before it is known that there is something to run.
"""

import argparse
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from t5x import __version__
from t5x.errors import UserError

USAGE = """\
Train, fine-tune, evaluate and run T5-family models.

verbs:
  demo    train a tiny T5 on this machine in a few minutes, and see it work
  train   pretrain or fine-tune, as gin files say or from a plain file
  data    show what a task or a file becomes, and how long its examples are
  eval    score a checkpoint, or all of a run, with a task's metrics
  infer   write a model's predictions or scores for a file or a task
  inspect say what a checkpoint is, whatever its format
  cache   write a task's tokenised examples once; training then reads them
  convert convert a checkpoint: to ours, native T5X or Hugging Face

examples:
  t5x demo
  t5x train --gin_file=t5x/examples/demo/dates.gin --gin.MODEL_DIR=/tmp/dates --gin.TRAIN_STEPS=500
  t5x train --gin_file=my_run.gin --dry_run
  t5x train --model flan-t5-small --data train.jsonl --valid valid.jsonl --steps 1000 --model_dir runs/mine
  t5x infer --model runs/demo --input dates.txt --output predictions.jsonl
  t5x VERB --help
"""

GIN_HELP = """\
configuration:
  --gin_file FILE            a gin file; give it several times, later ones win. It is looked for in the search paths, in
                             the directory of the file that includes it, and in the directory above the t5x package
  --gin.NAME=VALUE           sets a macro or a parameter after all files: --gin.TRAIN_STEPS=1000,
                             --gin.train/utils.DatasetConfig.batch_size=64. What is not gin is taken as a string
  --gin_bindings 'N = VALUE' the same in gin's own words
  --gin_search_paths A,B     where gin files are looked for (default: .)
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0; 2 for what the user can mend; 130 and 75 after Ctrl-C and SIGTERM."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv[0] if argv else None
    if verb == "help" and len(argv) > 1:
        verb, argv = argv[1], [argv[1], "--help"]
    if verb in (None, "-h", "--help", "help"):
        with contextlib.suppress(BrokenPipeError):
            print("usage: t5x VERB [options]\n\n" + USAGE, flush=True)
        sys.exit(0)
    if verb == "--version":
        print(f"t5x {__version__}")
        sys.exit(0)
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f" Did you mean `t5x {near[0]}`?" if near else ""
        print(f"error: t5x has no verb {verb!r}.{hint} `t5x --help` lists them.", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_verb(verb, argv[1:]))


def main_of(verb: str) -> NoReturn:
    """What `python -m t5x.train` and `python t5x/train.py` run."""
    package = os.path.dirname(os.path.abspath(__file__))
    # Started as a script, Python put the package's own directory first on the path, where our modules shadow others'.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != package]
    sys.exit(run_verb(verb, sys.argv[1:]))


def run_verb(verb: str, argv: Sequence[str]) -> int:
    """Parses a verb's arguments and runs it; every error becomes a message and an exit code."""
    signal.signal(signal.SIGTERM, _leave_at_once)
    signal.signal(signal.SIGINT, _leave_at_once)
    from t5x import configuration, startup

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a gin file's `import my_tasks` finds my_tasks.py here
    define, run = VERBS[verb]
    parser = _parser(verb)
    define(parser)
    debug = "--debug" in argv
    startup.configure_logging(debug=debug)
    try:
        argv, bindings = configuration.split_gin_args(argv)
        args = parser.parse_args(argv)
        args.gin_bindings = [*(getattr(args, "gin_bindings", None) or ()), *bindings]
        run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        _say("\ninterrupted")
        return 130
    except Exception as error:
        root = configuration.root_cause(error)
        message = configuration.user_message(error)
        if isinstance(root, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing to tell it
            return 1
        if message is None and hasattr(root, "exit_code"):  # stopped in good order
            _say(str(root))
            return root.exit_code
        if debug or message is None:
            raise
        _say(f"error: {message}")
        return getattr(root, "exit_code", 2)


def _say(text: str) -> None:
    """To standard error, if anybody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _leave_at_once(signum: int, frame: FrameType | None) -> None:
    """A signal while nothing has been done yet. Training has a handler of its own, which saves."""
    _say("\ninterrupted" if signum == signal.SIGINT else "terminated")
    os._exit(130 if signum == signal.SIGINT else 75)


def _leave_in_order(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM while something is half written: it is cleaned up on the way out."""
    _say("terminated")
    sys.exit(75)


def _work_begins() -> None:
    """From here on Ctrl-C is Python's: what is half written is cleaned up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- Arguments --------------------------------------------------------------------------------------------------------


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"t5x {verb}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--debug", action="store_true", help="tracebacks, and more in the log")
    return parser


def _add_gin(parser: argparse.ArgumentParser) -> None:
    hide = {"help": argparse.SUPPRESS}  # told in the epilog, with --gin.NAME=VALUE, which argparse does not see
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", **hide)
    parser.add_argument("--gin_bindings", action="append", default=[], metavar="BINDING", **hide)
    parser.add_argument("--gin_search_paths", default=".", metavar="DIRS", **hide)
    parser.add_argument("--tfds_data_dir", metavar="DIR", help="where TensorFlow Datasets keeps its data")
    parser.add_argument(
        "--seqio_additional_cache_dirs", default="", metavar="DIR,DIR", help="offline caches of tasks of the real seqio"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the whole configuration and run nothing")
    _add_import(parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    help_ = "a module that registers tasks, by name or as a .py file; may be repeated"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=help_)


def _import_modules(args: argparse.Namespace) -> None:
    if args.modules:
        from t5x.data.config import import_task_module

        for module in args.modules:
            import_task_module(module)


def _describe(parser: argparse.ArgumentParser, text: str, examples: str) -> None:
    parser.description = text
    parser.epilog = GIN_HELP + "\nexamples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")


def _run_gin(args: argparse.Namespace, entry: Callable) -> None:
    """Reads the configuration, checks all of it, and calls the entry point."""
    from t5x import configuration, startup

    if args.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = args.tfds_data_dir
    if args.seqio_additional_cache_dirs:
        from t5x.data import seqio_bridge

        seqio_bridge.add_cache_directories(filter(None, args.seqio_additional_cache_dirs.split(",")))
    if not args.gin_file and not args.gin_bindings:
        raise UserError("there is nothing to run: give --gin_file=FILE. `--help` shows examples.")
    _import_modules(args)
    configuration.parse(
        gin_files=args.gin_file,
        bindings=args.gin_bindings,
        search_paths=[path for path in args.gin_search_paths.split(",") if path],
        entry_points={entry.__name__: entry},
    )
    configuration.check(entry)
    if args.dry_run:
        print(configuration.resolved_str())
        return
    startup.prepare_jax()
    _work_begins()
    configuration.configured(entry)()


# --- Verbs ------------------------------------------------------------------------------------------------------------


def _define_train(parser: argparse.ArgumentParser) -> None:
    from t5x import file_flags

    file_flags.add_train(parser)
    _add_gin(parser)
    _describe(
        parser,
        "Pretrain or fine-tune a model, as gin files say or from a plain file. Started again with the same MODEL_DIR, "
        "it goes on where it stopped.",
        """
        t5x train --model path/to/flan-t5-small --data train.jsonl --valid valid.jsonl --inputs question \\
            --targets answer --steps 1000 --model_dir runs/mine
        t5x train --size small --family byt5 --data train.tsv --inputs en --targets de --steps 10000 \\
            --model_dir runs/scratch
        t5x train --gin_file=t5x/examples/demo/dates.gin --gin.MODEL_DIR=/tmp/dates
        t5x train --gin_file=t5x/examples/t5/t5_1_1/small.gin --gin_file=t5x/configs/runs/finetune.gin \\
            --gin.MIXTURE_OR_TASK_NAME=my_task --import my_tasks.py …
        """,
    )


def _train(args: argparse.Namespace) -> None:
    from t5x import file_flags

    if not file_flags.given(args):
        from t5x.train import train

        return _run_gin(args, train)
    options = file_flags.check(args)
    from t5x.plain import PlainRun, train_file

    _work_begins()
    train_file(PlainRun(**options), bindings=args.gin_bindings, dry_run=args.dry_run, command=file_flags.command(args))
    return None


def _define_eval(parser: argparse.ArgumentParser) -> None:
    _add_gin(parser)
    _describe(
        parser,
        "Score a checkpoint, or every checkpoint of a run, with the metrics of a task.",
        """
        t5x eval --gin_file=t5x/examples/demo/dates_eval.gin --gin.CHECKPOINT_PATH=runs/demo \\
            --gin.EVAL_OUTPUT_DIR=runs/demo_eval
        """,
    )


def _eval(args: argparse.Namespace) -> None:
    from t5x.eval import evaluate

    _run_gin(args, evaluate)


def _define_infer(parser: argparse.ArgumentParser) -> None:
    file = parser.add_argument_group("for a file, with a model directory alone")
    file.add_argument("--model", metavar="DIR", help="a checkpoint, or a MODEL_DIR (its newest whole one is taken)")
    file.add_argument("--input", metavar="FILE", help="text, one input a line, or .jsonl; - is standard input")
    file.add_argument("--output", metavar="FILE", help="JSON lines; - is standard output (default)")
    file.add_argument("--mode", choices=("predict", "score"), help='or score given "targets" (default: predict)')
    file.add_argument("--max_length", type=int, metavar="N", help="tokens generated at most (128)")
    file.add_argument("--max_input_length", type=int, metavar="N", help="longer inputs are cut (512)")
    file.add_argument("--batch_size", type=int, metavar="N", help="inputs computed together (32)")
    file.add_argument("--overwrite", action="store_true", default=None, help="replace an output file that exists")
    _add_gin(parser)
    _describe(
        parser,
        "Write a model's predictions or scores: for a file with --model and --input, or for a task with gin files.",
        """
        t5x infer --model runs/demo --input dates.txt --output predictions.jsonl
        echo "the third of March '97" | t5x infer --model runs/demo --input -
        t5x infer --gin_file=t5x/configs/runs/infer.gin --gin_file=my_model.gin --gin.CHECKPOINT_PATH=… …
        """,
    )


def _infer(args: argparse.Namespace) -> None:
    names = ("output", "mode", "max_length", "max_input_length", "batch_size", "overwrite")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.model is None:
        if given or args.input is not None:
            flags = ", ".join(f"--{name}" for name in (["input"] if args.input else []) + list(given))
            raise UserError(
                f"{flags} goes with --model; a run by gin files has gin parameters for it (infer_script.infer)."
            )
        from t5x.infer import infer

        return _run_gin(args, infer)
    if args.gin_file or args.gin_bindings or args.dry_run:
        raise UserError(
            "--model takes all from the checkpoint; leave out --gin_file, --gin.… and --dry_run, or --model."
        )
    if args.input is None:
        raise UserError("--model needs --input: a text file, a .jsonl file, or - for standard input.")
    from t5x import startup

    startup.prepare_jax()
    from t5x.infer import infer_file

    _work_begins()
    infer_file(args.model, args.input, **given)
    return None


def _define_data(parser: argparse.ArgumentParser) -> None:
    from t5x import file_flags

    parser.description = (
        "Show the examples of a task, a mixture or a plain file: each preprocessor's work, tokens, a row of a batch, "
        "lengths, padding, and what is cut."
    )
    parser.add_argument("name", metavar="TASK", nargs="?", help="a registered task or mixture, unless --data is given")
    _add_import(parser)
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("-n", type=int, default=5, metavar="N", help="examples to show (5)")
    parser.add_argument("--lengths", metavar="L", help="as training would have them: inputs=512,targets=114")
    parser.add_argument("--pack", action="store_true", help="show a packed row")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order and of random steps (0)")
    file_flags.add_file(parser, "for a plain file, without a task")
    parser.epilog = (
        "examples:\n  t5x data my_task --import my_tasks.py --lengths inputs=512,targets=64 --pack\n"
        "  t5x data --data train.jsonl --inputs question --targets answer --vocabulary spiece.model"
    )


def _data(args: argparse.Namespace) -> None:
    from t5x import file_flags
    from t5x.data.view import view_named

    options = {name: value for name, value in file_flags.given(args).items() if name != "seed"}
    _import_modules(args)
    _work_begins()
    view_named(args.name, options, split=args.split, count=args.n, lengths=args.lengths, pack=args.pack, seed=args.seed)


def _define_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say what a checkpoint is: format, step, model, parameters. Any format, T5X's and others'."
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a MODEL_DIR")
    parser.add_argument("--json", action="store_true", help="as JSON, with a hash of all parameters")
    parser.epilog = "example:\n  t5x inspect runs/demo"


def _inspect(args: argparse.Namespace) -> None:
    from t5x.inspection import inspect

    _work_begins()
    inspect(args.path, as_json=args.json)


def _define_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = "Convert a checkpoint of any format to ours (t5x), native T5X (native) or Hugging Face (hf)."
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or a MODEL_DIR")
    parser.add_argument("destination", metavar="DST", help="the directory to make")
    parser.add_argument("--to", required=True, choices=("t5x", "native", "hf"), help="the format to write")
    parser.add_argument(
        "--layers", choices=("unrolled", "scanned"), default="unrolled", help="one array a layer (default), or stacked"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters (default: as they are)")
    parser.add_argument("--overwrite", action="store_true", help="replace a destination that exists")
    parser.epilog = "example:\n  t5x convert runs/demo demo_hf --to hf"


def _convert(args: argparse.Namespace) -> None:
    from t5x.convert import convert

    _work_begins()
    signal.signal(signal.SIGTERM, _leave_in_order)
    convert(args.source, args.destination, to=args.to, layers=args.layers, dtype=args.dtype, overwrite=args.overwrite)


def _define_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the tokenised examples of a task, or of all tasks of a mixture, once. Training finds them by itself, "
        "and its batches stay the same. Stopped and started again, it goes on."
    )
    parser.add_argument("name", metavar="TASK", help="a registered task or mixture")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="that registers it, or a .py",
    )
    parser.add_argument("--split", action="append", metavar="SPLIT", help="may be repeated (default: all it has)")
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="default: the first of T5X_TASK_CACHES, the directories, parted by ':', in which caches are looked for. "
        "Unset, that is `tasks` in T5X_CACHE_DIR or ~/.cache/t5x; empty, no cache is used",
    )
    parser.add_argument("--num_workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--overwrite", action="store_true", help="replace a cache that is there")
    parser.add_argument("--drop_text", action="store_true", help="without *_pretokenized: smaller, for training only")
    parser.add_argument("--skip_bad_examples", action="store_true", help="count examples that cannot be read")
    parser.add_argument("--runner", metavar="RUNNER", help="Apache Beam's, such as DirectRunner, instead of processes")
    parser.epilog = "example:\n  t5x cache --import my_tasks.py my_task --split train"


def _cache(args: argparse.Namespace) -> None:
    from t5x.cache import cache

    _work_begins()
    signal.signal(signal.SIGTERM, _leave_in_order)
    cache(
        args.name,
        modules=args.modules,
        splits=args.split,
        output_dir=args.output_dir,
        num_workers=args.num_workers,
        overwrite=args.overwrite,
        drop_text=args.drop_text,
        skip_bad_examples=args.skip_bad_examples,
        runner=args.runner,
    )


def _define_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a tiny byte-level T5 to write dates as ISO dates, on this machine, and show what it learned."
    )
    parser.add_argument("--model_dir", default=os.path.join("runs", "demo"), metavar="DIR", help="default: runs/demo")


def _demo(args: argparse.Namespace) -> None:
    from t5x.demo import demo

    demo(args.model_dir, bindings=args.gin_bindings)


VERBS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]] = {
    "demo": (_define_demo, _demo),
    "train": (_define_train, _train),
    "data": (_define_data, _data),
    "eval": (_define_eval, _eval),
    "infer": (_define_infer, _infer),
    "inspect": (_define_inspect, _inspect),
    "convert": (_define_convert, _convert),
    "cache": (_define_cache, _cache),
}

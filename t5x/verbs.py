"""The verbs of the `t5x` command: the arguments of each, and a few lines over its entry point.

Nothing here imports JAX before it is known that there is something to run.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from t5x.errors import UserError

GIN_HELP = """\
configuration:
  --gin_file FILE            a gin file; give it several times, later ones win. It is looked for in the search paths, in
                             the directory of the file that includes it, and in the directory above the t5x package
  --gin.NAME=VALUE           sets a macro or a parameter after all files: --gin.TRAIN_STEPS=1000,
                             --gin.train/utils.DatasetConfig.batch_size=64. What is not gin is taken as a string
  --gin_bindings 'N = VALUE' the same in gin's own words
  --gin_search_paths A,B     where gin files are looked for (default: .)
"""


def _leave_in_order(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM while something is half written: it is cleaned up on the way out."""
    print("terminated", file=sys.stderr, flush=True)
    sys.exit(75)


def _work_begins() -> None:
    """From here on Ctrl-C is Python's: what is half written is cleaned up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- Arguments --------------------------------------------------------------------------------------------------------


def parser(verb: str) -> argparse.ArgumentParser:
    """What every verb has."""
    made = argparse.ArgumentParser(
        prog=f"t5x {verb}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--debug", action="store_true", help="tracebacks, and more in the log")
    return made


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
    processes = parser.add_argument_group(
        "several processes", "SLURM, Open MPI, Kubernetes and TPU pods are found by themselves"
    )
    processes.add_argument("--coordinator_address", metavar="HOST:PORT", help="of process 0")
    processes.add_argument("--process_count", type=int, metavar="N", help="how many there are")
    processes.add_argument("--process_index", type=int, metavar="I", help="which of them this one is, from 0")
    processes.add_argument(
        "--initialization_timeout", type=int, default=300, metavar="SECONDS", help="to wait for the others (300)"
    )
    processes.add_argument("--multiprocess_gpu", action="store_true", help="there must be several processes")


@contextlib.contextmanager
def _processes(args: argparse.Namespace) -> Iterator[None]:
    """Joins the processes of a run, if there are several, around what they do together."""
    from t5x import startup
    from t5x.partitioning import distributed

    names = ("coordinator_address", "process_count", "process_index", "initialization_timeout", "multiprocess_gpu")
    startup.prepare_jax()
    with distributed.run(**{name: getattr(args, name) for name in names}):
        startup.name_process()
        yield


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


def _run_gin(args: argparse.Namespace, entry: Callable) -> Any:
    """Reads the configuration, checks all of it, and calls the entry point; returns what that does."""
    from t5x import configuration

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
        return None
    _work_begins()
    with _processes(args):
        return configuration.configured(entry)()


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
    train_file(
        PlainRun(**options),
        bindings=args.gin_bindings,
        dry_run=args.dry_run,
        command=file_flags.command(args),
        processes=_processes(args),
    )
    return None


def _define_eval(parser: argparse.ArgumentParser) -> None:
    from t5x import file_flags

    parser.add_argument("--json", action="store_true", help="print a JSON line for each step and task, not a table")
    file_flags.add_file(parser, "for a plain file, with a model directory alone")
    plain = parser.add_argument_group("and with it")
    plain.add_argument("--model", metavar="DIR", help="any checkpoint that `t5x inspect` knows, or a MODEL_DIR")
    plain.add_argument("--all", action="store_true", default=None, help="every checkpoint of the MODEL_DIR")
    plain.add_argument("--metric", action="append", metavar="NAME", help="bleu, chrf, rouge, squad, accuracy, … of "
                       "t5x.metrics; may be repeated (exact_match)")  # fmt: skip
    plain.add_argument("--beams", type=int, metavar="N", help="beam search (1, greedy)")
    plain.add_argument("--max_length", type=int, metavar="N", help="tokens generated at most (128)")
    plain.add_argument("--max_input_length", type=int, metavar="N", help="longer inputs are cut (512 tokens)")
    plain.add_argument("--batch_size", type=int, metavar="N", help="examples computed together (32)")
    plain.add_argument("--output", metavar="DIR", help="for predictions and metrics (default: they are only printed)")
    plain.add_argument("--skip_bad_examples", action="store_true", default=None, help="pass over unreadable lines")
    _add_gin(parser)
    _describe(
        parser,
        "Score a checkpoint, or every checkpoint of a run: on a plain file with --model and --data, or with the "
        "metrics of a task with gin files. Prints a table; stopped and started again, it goes on.",
        """
        t5x eval --model runs/mine --data test.jsonl --inputs en --targets de --metric bleu --metric chrf
        t5x eval --model runs/mine --all --data valid.tsv --metric accuracy --output runs/mine_eval
        t5x eval --gin_file=t5x/examples/demo/dates_eval.gin --gin.CHECKPOINT_PATH=runs/demo \\
            --gin.EVAL_OUTPUT_DIR=runs/demo_eval
        """,
    )


_EVAL_FILE = (
    "model", "data", "inputs", "targets", "prefix", "vocabulary", "all", "metric", "beams", "max_length",
    "max_input_length", "batch_size", "output", "skip_bad_examples",
)  # fmt: skip


def _eval(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in _EVAL_FILE if getattr(args, name) is not None}
    if not given:
        from t5x.eval import evaluate

        signal.signal(signal.SIGTERM, _leave_in_order)
        results = _run_gin(args, evaluate)
    else:
        results = _eval_file(args, given)
    if results is None:
        return
    import jax

    from t5x.eval_table import print_results

    if jax.process_index() == 0:
        print_results(results, as_json=args.json)


def _eval_file(args: argparse.Namespace, given: dict[str, Any]) -> Any:
    if missing := [f"--{name}" for name in ("model", "data") if name not in given]:
        flags = ", ".join(f"--{name}" for name in given)
        raise UserError(f"{flags} needs {' and '.join(missing)} too; a run by gin files has gin parameters for it.")
    if args.gin_file or args.gin_bindings or args.dry_run:
        raise UserError(
            "--model takes all from the checkpoint; leave out --gin_file, --gin.… and --dry_run, or --model."
        )
    if args.tfds_data_dir or args.seqio_additional_cache_dirs:
        raise UserError("--tfds_data_dir and --seqio_additional_cache_dirs are for tasks: leave them out, or --model.")
    _import_modules(args)  # classes of the user's own, such as a vocabulary
    _work_begins()
    signal.signal(signal.SIGTERM, _leave_in_order)
    with _processes(args):
        from t5x.plain_eval import PlainEvaluation, evaluate_file

        words = [word for name, value in given.items() for word in _as_flag(name, value)]
        return evaluate_file(PlainEvaluation(**given), command=shlex.join(["t5x", "eval", *words]))


def _as_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for one in value for word in _as_flag(name, one)]
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def _define_infer(parser: argparse.ArgumentParser) -> None:
    file = parser.add_argument_group("for a file, with a model directory alone")
    file.add_argument("--model", metavar="DIR", help="a checkpoint, or a MODEL_DIR (its newest whole one is taken)")
    file.add_argument("--input", metavar="FILE", help="text, one input a line, or .jsonl; - is standard input")
    file.add_argument("--output", metavar="FILE", help="JSON lines; - is standard output (default)")
    file.add_argument("--mode", choices=("predict", "score"), help='or score given "targets" (default: predict)')
    file.add_argument("--max_length", type=int, metavar="N", help="tokens generated at most (128)")
    file.add_argument("--max_input_length", type=int, metavar="N", help="longer inputs are cut (512)")
    file.add_argument("--long", choices=("truncate", "error"), help="cut longer inputs (default), or refuse them")
    file.add_argument("--batch_size", type=int, metavar="N", help="inputs computed together (32)")
    file.add_argument("--checkpoint_period", type=int, metavar="N", help="batches after which results are kept (16)")
    file.add_argument("--output_ids", action="store_true", default=None, help="also write prediction_tokens")
    file.add_argument("--overwrite", action="store_true", default=None, help="replace an output file that exists")
    file.add_argument("--vocabulary", metavar="FILE", help="where the model has none: spiece.model, or bytes")
    decoding = parser.add_argument_group("decoding, with --model", "greedy, unless told otherwise")
    decoding.add_argument("--beams", type=int, metavar="N", help="beam search (1)")
    decoding.add_argument("--length_penalty", type=float, metavar="X", help="of beams (default: T5X's, alpha 0.6)")
    decoding.add_argument("--num_return", type=int, metavar="N", help="results for an input, best first (1)")
    decoding.add_argument("--temperature", type=float, metavar="X", help="sample")
    decoding.add_argument("--top_k", type=int, metavar="N", help="sample from the likeliest tokens")
    decoding.add_argument("--top_p", type=float, metavar="X", help="sample from tokens of this probability together")
    decoding.add_argument("--seed", type=int, metavar="N", help="of samples (0)")
    decoding.add_argument("--min_length", type=int, metavar="N", help="tokens generated at least")
    decoding.add_argument("--no_repeat_ngram", type=int, metavar="N", help="so many tokens never stand there twice")
    decoding.add_argument("--repetition_penalty", type=float, metavar="X", help="above 1: fewer repeated tokens")
    decoding.add_argument("--choices", metavar="FILE", help="only these texts, one a line, may come out")
    shards = parser.add_argument_group("parts of the input, each by a program of its own")
    shards.add_argument("--num_shards", type=int, metavar="N", help="how many (1)")
    shards.add_argument("--shard_id", type=int, metavar="I", help="which of them this one does, from 0")
    _add_gin(parser)
    _describe(
        parser,
        "Write a model's predictions or scores: for a file with --model and --input, or for a task with gin files. "
        "Stopped and started again, it goes on.",
        """
        t5x infer --model runs/demo --input dates.txt --output predictions.jsonl
        t5x infer --model google/flan-t5-small --input in.jsonl --output out.jsonl --beams 4 --max_length 64
        echo "the third of March '97" | t5x infer --model runs/demo --input -
        t5x infer --gin_file=t5x/configs/runs/infer.gin --gin_file=my_model.gin --gin.CHECKPOINT_PATH=… …
        """,
    )


_INFER_FILE = (
    "output", "mode", "max_length", "max_input_length", "long", "batch_size", "checkpoint_period", "output_ids",
    "overwrite", "vocabulary", "beams", "length_penalty", "num_return", "temperature", "top_k", "top_p", "seed",
    "min_length", "no_repeat_ngram", "repetition_penalty", "choices",
)  # fmt: skip


def _infer(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in _INFER_FILE if getattr(args, name) is not None}
    shard = {name: getattr(args, name) for name in ("num_shards", "shard_id") if getattr(args, name) is not None}
    if args.model is None:
        if given or args.input is not None:
            flags = ", ".join(f"--{name}" for name in (["input"] if args.input else []) + list(given))
            raise UserError(
                f"{flags} goes with --model; a run by gin files has gin parameters for it (infer_script.infer)."
            )
        from t5x.infer import infer

        if args.gin_file or args.gin_bindings:
            args.gin_bindings += [f"infer.{name} = {value}" for name, value in shard.items()]
        return _run_gin(args, infer)
    if args.gin_file or args.gin_bindings or args.dry_run:
        raise UserError(
            "--model takes all from the checkpoint; leave out --gin_file, --gin.… and --dry_run, or --model."
        )
    if args.tfds_data_dir or args.seqio_additional_cache_dirs:
        raise UserError("--tfds_data_dir and --seqio_additional_cache_dirs are for tasks: leave them out, or --model.")
    if args.input is None:
        raise UserError("--model needs --input: a text file, a .jsonl file, or - for standard input.")
    if "choices" in given:
        given["choices"] = _lines_of(given["choices"])
    _import_modules(args)  # classes of the user's own, such as a vocabulary
    _work_begins()
    signal.signal(signal.SIGTERM, _leave_in_order)
    with _processes(args):
        from t5x.inference.files import infer_file

        infer_file(args.model, args.input, **given, **shard)
    return None


def _lines_of(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.rstrip("\r\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--choices {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not any(lines):
        raise UserError(f"--choices {path} has no line: give one text a line.")
    return [line for line in lines if line]


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

"""`t5x answer`: its arguments and the call of its entry point."""

import argparse
import json
import signal
import textwrap
from typing import Any

from t5x.errors import UserError
from t5x.verbs.arguments import (
    add_import,
    add_model,
    add_processes,
    import_modules,
    leave_in_order,
    processes,
    work_begins,
)

_OPTIONS = ("no_answer", "beams", "max_length", "max_input_length", "stride", "batch_size")
_FILE = ("output", "squad_predictions", "squad_na_probs", "checkpoint_period", "overwrite")


def define(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True, help="a checkpoint, or a MODEL_DIR")
    one = parser.add_argument_group("one question")
    one.add_argument("--question", metavar="TEXT")
    one.add_argument("--context", metavar="TEXT", help="in which the answer is looked for")
    one.add_argument("--json", action="store_true", default=None, help="print all that is known of the answer")
    file = parser.add_argument_group("or a file of them")
    file.add_argument("--input", metavar="FILE", help='JSON lines with "question", "context" and perhaps "id" (- is '
                      "standard input), or SQuAD's official .json, whose answers are then scored")  # fmt: skip
    file.add_argument("--output", metavar="FILE", help="JSON lines; - is standard output (default)")
    file.add_argument("--squad_predictions", metavar="FILE", help="also write {id: answer}, as SQuAD's scripts read it")
    file.add_argument("--squad_na_probs", metavar="FILE", help="also write {id: probability that there is no answer}")
    file.add_argument("--checkpoint_period", type=int, metavar="N", help="batches after which results are kept (16)")
    file.add_argument("--overwrite", action="store_true", default=None, help="replace an output file that exists")
    how = parser.add_argument_group("how")
    how.add_argument("--no_answer", metavar="TEXT", help="what the model was trained to write where there is no answer")
    how.add_argument("--beams", type=int, metavar="N", help="beam search (1, greedy)")
    how.add_argument("--max_length", type=int, metavar="N", help="tokens of an answer at most (64)")
    how.add_argument("--max_input_length", type=int, metavar="N", help="tokens of question and context (512); longer "
                     "contexts are read in windows, and the best answer is taken")  # fmt: skip
    how.add_argument("--stride", type=int, metavar="N", help="tokens that two consecutive windows share (128)")
    how.add_argument("--batch_size", type=int, metavar="N", help="windows computed together (32)")
    add_model(how)
    add_import(parser)
    add_processes(parser)
    parser.description = (
        'Answer questions about texts, by a model that was trained on "question: … context: …": each answer with its '
        "place in the text and its log probability. Stopped and started again, a file goes on."
    )
    examples = """
        t5x answer --model runs/squad --question "Who wrote it?" --context "Effi Briest was written by Theodor Fontane."
        t5x answer --model runs/squad --input questions.jsonl --output answers.jsonl --beams 4
        t5x answer --model runs/squad2 --input dev-v2.0.json --output answers.jsonl --no_answer unanswerable \\
            --squad_predictions predictions.json --squad_na_probs na_probs.json
        """
    parser.epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")


def run(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    of_file = {name: getattr(args, name) for name in _FILE if getattr(args, name) is not None}
    if args.input is None:
        if args.question is None or args.context is None:
            raise UserError("Give --question and --context, or --input: a file of questions.")
        if of_file:
            raise UserError(f"{', '.join(f'--{name}' for name in of_file)} goes with --input, a file of questions.")
    elif single := [f"--{name}" for name in ("question", "context", "json") if getattr(args, name) is not None]:
        raise UserError(f"{', '.join(single)} goes without --input: give one question, or a file of them.")
    import_modules(args)  # they may define classes, such as a vocabulary
    work_begins()
    signal.signal(signal.SIGTERM, leave_in_order)
    with processes(args):
        if args.input is None:
            _answer_one(args, given)
        else:
            from t5x.answering.file_answering import answer_file

            answer_file(args.model, args.input, vocabulary=args.vocabulary, dtype=args.dtype, **of_file, **given)


def _answer_one(args: argparse.Namespace, given: dict[str, Any]) -> None:
    import t5x
    from t5x.answering.file_answering import as_record
    from t5x.partitioning import distributed

    model = t5x.load(args.model, vocabulary=args.vocabulary, dtype=args.dtype)
    found = model.answer(args.question, args.context, **given)
    if distributed.is_leader():
        print(json.dumps(as_record(found), ensure_ascii=False) if args.json else found.text, flush=True)

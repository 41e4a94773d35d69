"""`t5x answer`: its arguments and the call of its entry point."""

import argparse
import json
from typing import Any

from t5x._runtime.errors import UserError
from t5x.cli.options import (
    add_batches,
    add_import,
    add_model,
    add_output,
    add_processes,
    flags,
    given_options,
    job_process,
)
from t5x.cli.parser import VerbParser

_OPTIONS = ("no_answer", "beams", "max_length", "max_input_length", "stride", "batch_size")
_FILE_OPTIONS = ("output", "squad_predictions", "squad_na_probs", "checkpoint_period", "overwrite")


def define(parser: VerbParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True, help="a checkpoint, or a MODEL_DIR")
    single = parser.add_argument_group("one question")
    single.add_argument("--question", metavar="TEXT")
    single.add_argument("--context", metavar="TEXT", help="the text that contains the answer")
    single.add_argument("--json", action="store_true", default=None, help="also print the answer's score and position")
    file = parser.add_argument_group("or a file of questions")
    file.add_argument("--input", metavar="FILE", help='JSON lines with "question", "context" and optionally "id" (- is '
                      "standard input), or SQuAD's official .json, whose answers are then scored")  # fmt: skip
    add_output(file, "JSON lines")
    file.add_argument("--squad_predictions", metavar="FILE", help="also write {id: answer}, as SQuAD's scripts read it")
    file.add_argument("--squad_na_probs", metavar="FILE", help="also write {id: probability that there is no answer}")
    model = parser.add_argument_group("model")
    model.add_argument("--no_answer", metavar="TEXT", help="what the model was trained to generate without an answer")
    model.add_argument("--beams", type=int, metavar="N", help="beam search (1, greedy)")
    model.add_argument("--max_length", type=int, metavar="N", help="maximum tokens of an answer (64)")
    model.add_argument("--max_input_length", type=int, metavar="N", help="tokens of question and context (512); longer "
                       "contexts are read in windows, and the best answer is used")  # fmt: skip
    model.add_argument("--stride", type=int, metavar="N", help="tokens that two consecutive windows share (128)")
    add_batches(model, "windows", checkpoint_period=16)
    add_model(model)
    add_import(parser)
    add_processes(parser)
    parser.set_help(
        'Answer questions about passages, with a model that was trained on "question: … context: …". Answers come with '
        "their position in the text and their log probability. A run that was interrupted resumes.",
        """
        t5x answer --model google/flan-t5-small --question "Who wrote it?" --context "Fontane wrote Effi Briest."
        t5x answer --model runs/squad2 --input dev-v2.0.json --output answers.jsonl --no_answer unanswerable \\
            --squad_predictions predictions.json --squad_na_probs na_probs.json
        """,
    )


def run(args: argparse.Namespace) -> None:
    options, file_options = given_options(args, _OPTIONS), given_options(args, _FILE_OPTIONS)
    if args.input is None:
        if args.question is None or args.context is None:
            raise UserError("Pass --question and --context, or --input, a file of questions.")
        if file_options:
            raise UserError(f"{flags(file_options)} can only be used with --input, a file of questions.")
    elif single := given_options(args, ("question", "context", "json")):
        raise UserError(f"{flags(single)} cannot be used with --input: pass one question, or a file of questions.")
    with job_process(args):
        if args.input is None:
            _answer_one(args, options)
        else:
            from t5x.apps.answering.file_answering import answer_file

            model = given_options(args, ("vocabulary", "dtype"))
            answer_file(args.model, args.input, **model, **file_options, **options)


def _answer_one(args: argparse.Namespace, options: dict[str, Any]) -> None:
    from t5x.apps.answering.answers import Answer, AnswerMethods
    from t5x.inference import loaded
    from t5x.partitioning import distributed
    from t5x.partitioning.multiprocess import enable_compilation_cache

    enable_compilation_cache()
    model = loaded.load(args.model, vocabulary=args.vocabulary, dtype=args.dtype, model_class=AnswerMethods)
    assert isinstance(model, AnswerMethods)
    answer = model.answer(args.question, args.context, **options)
    assert isinstance(answer, Answer)
    if distributed.is_leader():
        print(json.dumps(answer.as_record(), ensure_ascii=False) if args.json else answer.text, flush=True)

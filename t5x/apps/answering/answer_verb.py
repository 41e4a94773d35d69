"""`t5x answer`: its arguments and the call of its entry point."""

import argparse
import json

from t5x._runtime.errors import UserError
from t5x.apps.answering.answer_options import AnswerOptions, QuestionFile, SingleQuestion
from t5x.cli.options import ModelOptions, add_import, add_processes, flags, job_process
from t5x.cli.parser import VerbParser, add_options, passed_options


def define(parser: VerbParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True, help="a checkpoint, or a MODEL_DIR")
    add_options(parser.add_argument_group("one question"), SingleQuestion)
    add_options(parser.add_argument_group("or a file of questions"), QuestionFile, first=("input",))
    model = parser.add_argument_group("model")
    add_options(model, AnswerOptions)
    add_options(model, ModelOptions)
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
    file, single = passed_options(args, QuestionFile), passed_options(args, SingleQuestion)
    if args.input is None:
        if args.question is None or args.context is None:
            raise UserError("Pass --question and --context, or --input, a file of questions.")
        if file:
            raise UserError(f"{flags(file)} can only be used with --input, a file of questions.")
    elif single:
        raise UserError(f"{flags(single)} cannot be used with --input: pass one question, or a file of questions.")
    options, loading = AnswerOptions(**passed_options(args, AnswerOptions)), passed_options(args, ModelOptions)
    with job_process(args):
        if args.input is not None:
            from t5x.apps.answering.answers import answer_file

            answer_file(args.model, QuestionFile(**file), options, **loading)
            return
        from t5x.apps.answering.answers import answer, windows_of
        from t5x.inference.loaded import load
        from t5x.partitioning import distributed

        model, pair = load(args.model, **loading), (args.question, args.context)
        (result,) = answer(model, [pair], [windows_of(model, *pair, options)], options)
        if distributed.is_leader():
            print(json.dumps(result.as_record(), ensure_ascii=False) if args.json else result.text, flush=True)

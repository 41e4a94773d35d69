"""`t5x train`: its arguments and the call of its entry point."""

import argparse

from t5x.verbs import file_options
from t5x.verbs.arguments import add_gin, describe, processes, run_gin, work_begins
from t5x.verbs.file_options import FileTraining


def define(parser: argparse.ArgumentParser) -> None:
    file_options.add(parser, "data file (no gin, no Python)", FileTraining)
    add_gin(parser)
    describe(
        parser,
        "Pretrain or fine-tune a model, configured by gin files or, for a data file, by options. A run that is started "
        "again with the same MODEL_DIR resumes.",
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


def run(args: argparse.Namespace) -> None:
    given = file_options.given(args, FileTraining)
    if not given:
        from t5x.train import train

        run_gin(args, train)
        return
    options = file_options.check(args)
    from t5x.verbs.file_training import train_file

    work_begins()
    train_file(
        options,
        bindings=args.gin_bindings,
        dry_run=args.dry_run,
        strict=args.strict,
        command=file_options.command("train", given, args.gin_bindings),
        processes=processes(args),
    )

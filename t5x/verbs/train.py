"""`t5x train`: its arguments and the call of its entry point."""

import argparse

from t5x.verbs.arguments import add_gin, describe, processes, run_gin, work_begins


def define(parser: argparse.ArgumentParser) -> None:
    from t5x import file_flags

    file_flags.add_train(parser)
    add_gin(parser)
    describe(
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


def run(args: argparse.Namespace) -> None:
    from t5x import file_flags

    if not file_flags.given(args):
        from t5x.train import train

        return run_gin(args, train)
    options = file_flags.check(args)
    from t5x.plain import PlainRun, train_file

    work_begins()
    train_file(
        PlainRun(**options),
        bindings=args.gin_bindings,
        dry_run=args.dry_run,
        strict=args.strict,
        command=file_flags.command(args),
        processes=processes(args),
    )
    return None

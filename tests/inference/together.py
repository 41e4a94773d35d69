"""Inference, ranking, answers and evaluation, one after the other, by the processes of a run.

    together.py DIRECTORY INDEX COUNT PORT

DIRECTORY has the MODEL_DIR `model` and the inputs; results come to `DIRECTORY/of-<COUNT>`. Other processes
than the first look at MODEL_DIR before its newest checkpoint is there.
"""

import sys
from pathlib import Path

from t5x import data
from t5x._runtime import startup
from t5x.apps.answering.answer_options import AnswerOptions, QuestionFile
from t5x.apps.answering.answers import answer_file
from t5x.apps.ranking.ranking_options import RerankOptions
from t5x.apps.ranking.rerank_job import rerank
from t5x.checkpoints import paths
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.cli.file_evaluation import evaluate_file
from t5x.cli.file_inference import infer_file
from t5x.cli.file_options import FileEvaluation, FileInference
from t5x.data.dataset_config import DatasetConfig
from t5x.inference.loaded import open_model
from t5x.partitioning import PjitPartitioner, multiprocess
from t5x.runs.infer import infer


def work(directory: Path, output: Path) -> None:
    model_dir, pairs = str(directory / "model"), str(directory / "pairs.jsonl")
    infer_file(
        FileInference(
            model=model_dir, input=str(directory / "in.txt"), output=str(output / "out.jsonl"), max_target_length=6,
            max_input_length=8, batch_size=4, checkpoint_period=1, temperature=1.3, seed=3,
        )
    )  # fmt: skip
    vocabulary = data.ByteVocabulary(extra_ids=125)
    task = data.Task(
        "pairs",
        data.JsonLinesDataSource({"test": pairs}),
        {name: data.Feature(vocabulary) for name in ("inputs", "targets")},
        [data.preprocessors.tokenize, data.preprocessors.append_eos_after_trim],
    )
    infer(
        mode="score",
        model=open_model(model_dir)[1],
        dataset_cfg=DatasetConfig(task, {"inputs": 8, "targets": 8}, "test", 4, shuffle=False, seed=0),
        restore_checkpoint_cfg=RestoreCheckpointConfig(path=model_dir),
        partitioner=PjitPartitioner(),
        output_dir=str(output / "task"),
        checkpoint_period=1,
        summarize_config_fn=None,
    )
    rerank(
        RerankOptions(
            model=model_dir, input=str(directory / "passages.tsv"), output=str(output / "run.trec"),
            template="{query}{document}", labels="a,b", max_length=8, batch_size=4, checkpoint_period=1,
        )
    )  # fmt: skip
    questions = QuestionFile(
        input=str(directory / "questions.jsonl"), output=str(output / "answers.jsonl"), checkpoint_period=1
    )
    answer_file(model_dir, questions, AnswerOptions(max_length=6, max_input_length=32, stride=1, batch_size=4))
    evaluate_file(
        FileEvaluation(
            model=model_dir, data=pairs, metric=["chrf"], max_target_length=6, max_input_length=8, batch_size=4,
            output=str(output / "eval"),
        )
    )  # fmt: skip


def main() -> None:
    directory, index, count, port = Path(sys.argv[1]), *map(int, sys.argv[2:])
    if index:
        list_steps = paths.list_steps
        paths.list_steps = lambda model_dir: list_steps(model_dir)[:-1]
    startup.configure_logging(debug=False)
    multiprocess.enable_compilation_cache()
    with multiprocess.run(coordinator_address=f"127.0.0.1:{port}", process_count=count, process_index=index):
        work(directory, directory / f"of-{count}")


if __name__ == "__main__":
    main()

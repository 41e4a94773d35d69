"""T5X's `InteractiveModel`: train, predict, score and evaluate on a few examples, in a notebook.

    model = InteractiveModel(
        batch_size=8, task_feature_lengths={"inputs": 32, "targets": 16}, output_dir="runs/notebook",
        partitioner=PjitPartitioner(), model=my_model, dtype="float32", restore_mode="specific",
        checkpoint_path="flan_t5_small", input_shapes=None,
    )
    model.train_step([{"input": "2 + 2", "target": "4"}])
    model.predict_with_aux(["3 + 3"])

For inference only, `t5x.load` is simpler.
"""

import enum
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np

from t5x import checkpoints
from t5x._runtime.errors import UserError
from t5x.checkpoints.config import RestoreCheckpointConfig, SaveCheckpointConfig
from t5x.checkpoints.model_description import sidecars
from t5x.data import (
    Evaluator,
    Feature,
    FunctionDataSource,
    Task,
    TaskRegistry,
    eval_batches,
    get_mixture_or_task,
    preprocessors,
)
from t5x.data.dataset_config import DatasetConfig
from t5x.data.lanes import Order
from t5x.data.pipeline import Example, Pipeline, Preprocessor
from t5x.data.tasks import check_split, task_rates
from t5x.models import BaseTransformerModel
from t5x.optimizers.schedules import create_learning_rate_scheduler
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout, Trainer, TrainState
from t5x.trainer.evaluation import BatchProgram
from t5x.trainer.restore import RunState, restore_or_init
from t5x.trainer.trainer import summarize


class T5XScriptType(enum.StrEnum):
    """The entry point for which `get_gin_config_from_interactive_model` writes a file."""

    FINETUNING = "finetuning"
    INFERENCE = "inference"
    EVALUATION = "evaluation"
    PRETRAINING = "pretraining"


def get_gin_config_from_interactive_model(
    interactive_model: Any,
    script_type: T5XScriptType,
    task_name: str,
    partitioner_config_str: str,
    model_config_str: str,
    train_steps: int = 1,
    imports_str: str = "",
) -> str:
    """Return a gin file with which `t5x train`, `eval` or `infer` continues from the model's newest checkpoint.

    Call `save_checkpoint` first.

    Args:
      interactive_model: an `InteractiveModel`.
      task_name: name of a task, registered by a module that `imports_str` or --import imports.
      partitioner_config_str: gin text that binds the partitioner's parameters.
      model_config_str: gin text that defines MODEL, such as an `include` of a file in `t5x/examples`.
      train_steps: number of steps to train from the model's current step.
      imports_str: additional `import` lines.
    """
    script, model = T5XScriptType(script_type), interactive_model
    trains = script in (T5XScriptType.FINETUNING, T5XScriptType.PRETRAINING)
    name = {"finetuning": "finetune", "pretraining": "pretrain", "evaluation": "eval", "inference": "infer"}[script]
    start = model.newest_checkpoint
    values: dict[str, Any] = {"MIXTURE_OR_TASK_NAME": task_name, "TASK_FEATURE_LENGTHS": model.task_feature_lengths}
    if trains:
        values |= {"MODEL_DIR": model.output_dir, "TRAIN_STEPS": model.step + train_steps}
        values["BATCH_SIZE"] = model.batch_size
        values |= {"INITIAL_CHECKPOINT_PATH": start} if script is T5XScriptType.FINETUNING else {}
    elif start is None:
        raise UserError("There is no checkpoint of this model yet to evaluate or infer with: call save_checkpoint().")
    else:
        values |= {"CHECKPOINT_PATH": start, f"{name.upper()}_OUTPUT_DIR": os.path.join(model.output_dir, name)}
        values |= {"utils.DatasetConfig.batch_size": model.batch_size, "utils.DatasetConfig.split": "validation"}
    parts = [
        "from __gin__ import dynamic_registration\n",
        f"import __main__ as {'train' if trains else name}_script",
        "from t5x import partitioning\nfrom t5x import utils",
        imports_str,
        model_config_str,
        f"include 't5x/configs/runs/{name}.gin'\n",
        *(f"{macro} = {value!r}" for macro, value in values.items()),
        partitioner_config_str,
    ]
    return "\n".join(part for part in parts if part) + "\n"


TextExample = str | Mapping[str, Any]
Batch = Sequence[TextExample]
Batches = Batch | Sequence[Batch]

MetricFn = Callable[..., Mapping[str, Any]]

DEFAULT_PREPROCESSORS = (preprocessors.tokenize, preprocessors.append_eos_after_trim)


class InferenceType(enum.Enum):
    """What `infer_with_preprocessors` computes."""

    PREDICT_WITH_AUX = "predict_with_aux"
    SCORE = "score"


class InteractiveModel:
    """A model and its training state, for examples given as strings.

    It starts from the newest checkpoint in `output_dir`, else from `checkpoint_path`, else from scratch. An example is
    a string or {"input": string, "target": string}.

    Unlike T5X's, it saves only in `save_checkpoint` and at the end of `train_loop`, not after every step, and
    predictions are strings, not bytes.

    Args:
      batch_size: rows of every batch; smaller batches are padded with rows that are ignored.
      task_feature_lengths: {"inputs": tokens, "targets": tokens}; longer examples are truncated and keep their EOS.
      output_dir: directory for checkpoints.
      partitioner: the mesh.
      model: the model; to train it, it needs an `optimizer_def`.
      dtype: dtype of the parameters in saved checkpoints, `float32` or `bfloat16`; in memory they are float32.
      restore_mode: `specific` (`checkpoint_path` is a checkpoint) or `latest` (a directory of them).
      checkpoint_path: checkpoint of any format; None or "" starts from scratch.
      input_shapes: {model feature: [batch, length]} for the initialization; None uses `task_feature_lengths`.
      input_types: dtypes of these features; they must be integers.
      init_random_seed: seed of the initial parameters and of dropout.
      add_eos: whether to append EOS to inputs and targets.
      eval_names: accepted for compatibility with T5X; results are named by their metrics.
    """

    def __init__(
        self,
        batch_size: int,
        task_feature_lengths: Mapping[str, int],
        output_dir: str,
        partitioner: PjitPartitioner,
        model: BaseTransformerModel,
        dtype: Any,
        restore_mode: str,
        checkpoint_path: str | None,
        input_shapes: Mapping[str, Any] | None,
        input_types: Mapping[str, Any] | None = None,
        init_random_seed: int = 42,
        add_eos: bool = True,
        eval_names: Sequence[str] | None = None,
    ):
        if checkpoint_path and restore_mode not in ("specific", "latest"):
            raise UserError(f"restore_mode is {restore_mode!r}: it must be 'specific' or 'latest'.")
        for name, kind in (input_types or {}).items():
            if np.dtype(kind).kind not in "iu":
                raise UserError(f"input_types: {name!r} is {np.dtype(kind).name}; it must be an integer type.")
        self.batch_size, self.task_feature_lengths = batch_size, dict(task_feature_lengths)
        self.model, self.partitioner = model, partitioner
        self._save_cfg = SaveCheckpointConfig(dtype=np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name)
        self.checkpoint_path = checkpoint_path or None
        self.features = {
            "inputs": Feature(model.input_vocabulary, add_eos=add_eos),
            "targets": Feature(model.output_vocabulary, add_eos=add_eos),
        }
        self._store = checkpoints.CheckpointStore(checkpoints.make_directory(output_dir, "output_dir"))
        self.output_dir = str(self._store.directory)
        mode: Literal["specific", "latest"] = "latest" if restore_mode == "latest" else "specific"
        restore = RestoreCheckpointConfig(path=checkpoint_path, mode=mode) if checkpoint_path else None
        self._layout = StateLayout.of(model, partitioner, self._shapes(input_shapes))
        init_rng, dropout_rng = jax.random.split(jax.random.key(init_random_seed))
        state, run = restore_or_init(self._store, restore, model, self._layout, init_rng)
        self._run = RunState(run.first_step)
        rate = create_learning_rate_scheduler("constant", base_learning_rate=0.001)
        self.trainer = Trainer(
            model, state, partitioner, eval_names or [], self.output_dir, self._layout.shardings, dropout_rng, rate
        )
        self._train_metrics: list[Any] = []
        self._programs: dict[Any, Callable[..., Any]] = {}

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def train_state(self) -> TrainState:
        return self.trainer.train_state

    @property
    def train_state_axes(self) -> dict[str, Any]:
        """Logical axes of the state, by the names used in checkpoints."""
        return self._layout.tree_axes()

    @property
    def train_summary(self) -> dict[str, float]:
        """Metrics of the last train step; empty before the first."""
        return summarize(self._train_metrics)

    @property
    def step(self) -> int:
        return int(self.trainer.train_state.step)

    @property
    def newest_checkpoint(self) -> str | None:
        """The newest checkpoint in `output_dir`, else the one the model started from."""
        step = self._store.newest_step()
        return self.checkpoint_path if step is None else str(self._store.path(step))

    # -- training ------------------------------------------------------------------------------------------------------

    def train_step(self, examples: Batch) -> None:
        """Train one step on these examples, at most `batch_size` of them."""
        self.train_step_with_preprocessors(examples, DEFAULT_PREPROCESSORS)

    def train_step_with_preprocessors(self, examples: Batch, preprocessors: Sequence[Preprocessor]) -> None:
        """Train one step with your own preprocessors, which make `inputs` and `targets` of token ids.

        Args:
          preprocessors: like those of a task (see `t5x.data.pipeline.Pipeline`); they are given examples {"inputs":
            string, "targets": string}.
        """
        check_targets(examples)
        task = self.task("interactive", examples, preprocessors)
        rows = self.partitioner.rows(self.batch_size)
        batches = [batch.batch for batch in itertools.islice(self._batches(task, "train", rows=rows), 2)]
        if len(batches) > 1:
            raise UserError(f"A train step takes at most batch_size = {self.batch_size} examples; there are more.")
        self.train_step_from_batch_iterator(iter(batches))

    def train_step_from_batch_iterator(self, iterator: Iterator[Mapping[str, Any]]) -> None:
        """Train one step on the next batch, {model feature: [rows of this process, length]}."""
        if self.model.optimizer_def is None:
            raise UserError("The model has no optimizer: create it with optimizer_def to train it.")
        try:
            batch = next(iterator)
        except StopIteration:
            raise UserError("The iterator has no batch left to train on.") from None
        self._train_metrics = [self.trainer.step({name: np.asarray(value) for name, value in batch.items()})]

    def save_checkpoint(self) -> None:
        """Save the state as `<output_dir>/checkpoint_<step>`, which every verb can read. Return when it is complete."""
        with checkpoints.ModelDirLock(self.output_dir):
            tree = self._save_cfg.tree_to_save(self.train_state.state_dict())
            self._store.save(self.step, tree, sidecars=sidecars(self.model, None) | self._run.sidecars())
            self._store.wait()

    def train_loop(
        self,
        num_steps: int,
        eval_period: int | None = 1,
        train_batches: Batches | None = None,
        predict_batches: Batches | None = None,
        score_batches: Batches | None = None,
        eval_batches: Batches | None = None,
        metrics_fns: Sequence[MetricFn] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Train, then save. Every `eval_period` steps and at the end, predict, score and evaluate.

        Each of the batches arguments is one batch, a list of examples, or a list of batches. Training batches are
        repeated as needed; without them nothing is trained.

        Returns:
          The last (predictions, scores, metrics). Predictions and scores are lists of (example, string or score) over
          all batches; metrics are {metric: value} over all `eval_batches`. None for those without batches.
        """
        endless = itertools.cycle(as_batches(train_batches)) if train_batches else None
        predictions = scores = metrics = None
        for step in range(1, num_steps + 1):
            if endless is not None:
                self.train_step(next(endless))
            if step < num_steps and (not eval_period or step % eval_period):
                continue
            if predict_batches:
                predictions = self.predict_with_aux(joined(predict_batches))[0]
            if score_batches:
                scores = self.score(joined(score_batches))[0]
            if eval_batches:
                metrics = self.evaluate(joined(eval_batches), metrics_fns or ())
        if endless is not None and num_steps > 0:
            self.save_checkpoint()
        return predictions, scores, metrics

    # -- inference -----------------------------------------------------------------------------------------------------

    def predict_with_aux(self, examples: Batch) -> tuple[list[tuple[Example, Any]], dict[str, Any]]:
        """Return the generated strings: ([(example, string)], {"scores": a log probability for each})."""
        return self.infer_with_preprocessors(InferenceType.PREDICT_WITH_AUX, examples, DEFAULT_PREPROCESSORS)

    def score(self, examples: Batch) -> tuple[list[tuple[Example, float]], dict[str, Any]]:
        """Return the log probability of each target: ([(example, score)], {})."""
        return self.infer_with_preprocessors(InferenceType.SCORE, examples, DEFAULT_PREPROCESSORS)

    def infer_with_preprocessors(
        self, mode: InferenceType, examples: Batch, preprocessors: Sequence[Preprocessor], **inference_kwargs: Any
    ) -> tuple[list[tuple[Example, Any]], dict[str, Any]]:
        """Predict or score any number of examples.

        Args:
          preprocessors: see `train_step_with_preprocessors`.
          inference_kwargs: passed to the model's `predict_batch_with_aux` (num_decodes, return_all_decodes, …) or
            `score_batch`.

        Returns:
          [(preprocessed example, string or score)], and the auxiliary outputs as {name: a value for each example}.
        """
        mode = InferenceType(mode)
        if mode is InferenceType.SCORE:
            check_targets(examples)
        program = self._program(mode, inference_kwargs)
        task = self.task("interactive", examples, preprocessors)
        results: list[tuple[Example, Any]] = []
        aux_of_batches = []
        for batch, mask, preprocessed in self._batches(task, "validation"):
            outputs, aux = program(batch)
            values = map(float if mode is InferenceType.SCORE else self._text, outputs[mask])
            results += zip(preprocessed, values, strict=True)
            aux_of_batches.append(
                jax.tree.map(lambda x, mask=mask: x[mask] if x.shape[:1] == mask.shape else x[None], aux)
            )
        return results, jax.tree.map(lambda *arrays: list(np.concatenate(arrays)), *aux_of_batches)

    def evaluate(self, examples: Batch, metric_fns: Sequence[MetricFn]) -> dict[str, float]:
        """Return {metric: value} of these examples.

        Args:
          metric_fns: functions of `(targets, predictions)`, `(targets, scores)` or `(targets, predictions,
            aux_values)`.
        """
        return self.evaluate_with_preprocessors(examples, DEFAULT_PREPROCESSORS, metric_fns)

    def evaluate_with_preprocessors(
        self,
        examples: Batch,
        preprocessors: Sequence[Preprocessor],
        metric_fns: Sequence[MetricFn],
        postprocessor: Callable[..., Any] | None = None,
    ) -> dict[str, float]:
        """Evaluate with your own preprocessors.

        Args:
          preprocessors: see `train_step_with_preprocessors`.
          metric_fns: see `evaluate`.
          postprocessor: `postprocessor(text, example=…, is_target=…)` returns the value that the metrics compare.
        """
        check_targets(examples)
        if not metric_fns:
            raise UserError("metric_fns is empty: give at least one function to evaluate with, e.g. t5x.metrics.bleu.")
        task = self.task("interactive", examples, preprocessors, metric_fns, postprocessor)
        evaluator = Evaluator(
            task, self.model.FEATURE_CONVERTER_CLS(pack=False), "validation", sequence_length=self.task_feature_lengths,
            batch_size=self.batch_size,
        )  # fmt: skip
        predict, score = (self._program(mode, {}) for mode in InferenceType)
        results = evaluator.evaluate(
            step=self.step, predict_with_aux_fn=predict, score_fn=lambda batch: score(batch)[0]
        )
        return results[task.name]

    # -- data ----------------------------------------------------------------------------------------------------------

    def task(
        self,
        name: str,
        examples: Batch,
        preprocessors: Sequence[Preprocessor],
        metric_fns: Sequence[MetricFn] | None = None,
        postprocessor: Callable[..., Any] | None = None,
    ) -> Task:
        """Return a task of these examples. It is not registered."""
        steps = without_seqio(preprocessors)
        return Task(name, source_of(examples), self.features, steps, postprocessor, metric_fns)

    def _batches(self, task: Task, split: str, **options: Any) -> Iterator[Any]:
        cfg = DatasetConfig(task, self.task_feature_lengths, split, self.batch_size, shuffle=False, seed=self.step)
        return eval_batches(cfg, feature_converter=self.model.FEATURE_CONVERTER_CLS(pack=False), **options)

    def _shapes(self, shapes: Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
        needed = self.model.input_shapes(self.task_feature_lengths)
        if shapes is None:
            return needed
        if missing := needed.keys() - shapes.keys():
            raise UserError(f"input_shapes has no {', '.join(sorted(missing))}; give these, or None for all.")
        return {name: tuple(int(size) for size in shapes[name]) for name in shapes}

    def _text(self, ids: np.ndarray) -> Any:
        return self.model.output_vocabulary.decode(ids) if ids.ndim == 1 else [self._text(row) for row in ids]

    def _program(self, mode: InferenceType, options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
        """Return a function that runs a batch with the current parameters: (predictions or scores, auxiliary)."""
        key = (mode, tuple(sorted(options.items(), key=lambda item: item[0])))
        try:
            program = self._programs.get(key) or self._programs.setdefault(key, self._compile(mode, options))
        except TypeError:  # unhashable option
            program = self._compile(mode, options)
        return lambda batch: program(self.train_state.params, batch)

    def _compile(self, mode: InferenceType, options: Mapping[str, Any]) -> BatchProgram:
        def predict(params: Any, batch: Mapping[str, jax.Array]) -> Any:
            has_key = "decode_rng" in (options.get("decoder_params") or {})
            rng = {} if has_key else {"rng": jax.random.key(0)}
            return self.model.predict_batch_with_aux(params, batch, **rng | dict(options))

        def score(params: Any, batch: Mapping[str, jax.Array]) -> Any:
            scores = self.model.score_batch(params, batch, **options)
            return scores if isinstance(scores, tuple) else (scores, {})

        return BatchProgram(score if mode is InferenceType.SCORE else predict, self._layout, self.batch_size)


# --- Helpers under T5X's names ----------------------------------------------------------------------------------------


def get_seqio_task_from_examples(
    task_name: str,
    interactive_model: InteractiveModel,
    examples: Batch,
    preprocessors: Sequence[Preprocessor],
    metric_fns: Sequence[MetricFn] | None = None,
    add_to_registry: bool = True,
) -> Task:
    """Return a task of these examples with splits `train` and `validation`, by default registered for the verbs."""
    make = TaskRegistry.add if add_to_registry else Task
    steps = without_seqio(preprocessors)
    return make(task_name, source_of(examples), interactive_model.features, steps, metric_fns=metric_fns)


# --- Examples as sources and batches ----------------------------------------------------------------------------------


def get_dataset_from_natural_text_examples(
    examples: Batch,
    preprocessors: Sequence[Preprocessor],
    task_feature_lengths: Mapping[str, int] | None,
    features: Mapping[str, Feature],
) -> Any:
    """Return the preprocessed examples: a list, not yet truncated; with features of seqio, a tf.data.Dataset."""
    if not all(isinstance(feature, Feature) for feature in features.values()):
        return _seqio_dataset(_pairs(examples), preprocessors, task_feature_lengths, features)
    steps = without_seqio(preprocessors)
    pipeline = Pipeline("examples", source_of(examples), "train", steps, features, task_feature_lengths)
    return [example for index in range(len(pipeline)) for example in pipeline.outputs(0, index)]


def _seqio_dataset(pairs: Sequence[Example], steps: Sequence[Any], lengths: Any, features: Mapping[str, Any]) -> Any:
    import seqio
    import tensorflow as tf

    columns = {name: [pair[name] for pair in pairs] for name in pairs[0]}
    source = seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(columns), splits=["train"]
    )
    task = seqio.Task("examples", source=source, preprocessors=list(steps), output_features=features)
    return task.get_dataset(lengths, "train", shuffle=False, num_epochs=1)


def without_seqio(functions: Sequence[Preprocessor]) -> list[Preprocessor]:
    """Replace seqio's preprocessors, which take a tf.data.Dataset, by those of `t5x.data`."""
    is_seqio = lambda f: getattr(f, "__module__", "") == "seqio.preprocessors"
    return [getattr(preprocessors, f.__name__, f) if is_seqio(f) else f for f in functions]


def get_batches_from_seqio(
    task_or_mixture_name: str,
    split: str,
    batch_size: int,
    num_batches: int,
    get_pretokenized_examples: bool = True,
    sequence_length: Mapping[str, int] | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> list[list[dict[str, Any]]]:
    """Return batches of examples {"input", "target"} of a registered task, or of a mixture by its rates.

    Args:
      get_pretokenized_examples: return strings; False returns token ids.
      sequence_length: lengths for preprocessors that use them.
      shuffle, seed: order of the examples; the seed is also that of random preprocessors.
    """
    task_or_mixture = get_mixture_or_task(task_or_mixture_name)
    check_split(task_or_mixture, split)
    rates = {task: rate for task, rate in task_rates(task_or_mixture).items() if split in task.splits}
    streams = {task: _examples(task, split, sequence_length, shuffle, seed) for task in rates}
    tasks, shares = list(rates), np.array(list(rates.values())) / sum(rates.values())
    rng = np.random.default_rng(seed)
    examples: list[dict[str, Any]] = []
    for _ in range(batch_size * num_batches):
        task = tasks[rng.choice(len(tasks), p=shares)]
        example = next(streams[task], None)
        if example is None:
            raise UserError(
                f"Split {split!r} of {task_or_mixture.name!r} has fewer than {num_batches} batches of {batch_size}: "
                f"task {task.name!r} ended after {len(examples)} examples. Ask for fewer."
            )
        inputs, targets = (_value(task, example, name, get_pretokenized_examples) for name in ("inputs", "targets"))
        examples.append({"input": inputs, "target": targets})
    return [examples[i : i + batch_size] for i in range(0, len(examples), batch_size)]


def source_of(examples: Batch) -> FunctionDataSource:
    """Return a source of the examples as {"inputs", "targets"}, with the same examples in every split."""
    pairs = _pairs(examples)
    return FunctionDataSource(lambda split: pairs, splits=("train", "validation"))


def _pairs(examples: Batch) -> list[dict[str, Any]]:
    if isinstance(examples, str | Mapping):
        raise UserError("examples is a single example: pass a list.")
    pairs = [_pair(example) for example in examples]
    if not pairs:
        raise UserError("examples is empty: give at least one.")
    return pairs


def _pair(example: TextExample) -> dict[str, Any]:
    if isinstance(example, str):
        return {"inputs": example, "targets": ""}
    if "input" not in example:
        raise UserError(f'An example must be a string or {{"input": text, "target": text}}, not {sorted(example)}.')
    others = {name: value for name, value in example.items() if name not in ("input", "target")}
    return {"inputs": example["input"], "targets": example.get("target", ""), **others}


def check_targets(examples: Batch) -> None:
    """Raise a UserError if an example has no target."""
    for index, example in enumerate(examples):
        if isinstance(example, str) or "target" not in example:
            raise UserError(f'Example {index} has no target: give {{"input": text, "target": text}}.')


def as_batches(batches: Batches) -> list[Batch]:
    """Return a list of batches, given one batch or a list of them."""
    is_one = isinstance(batches[0], str | Mapping)
    return [cast("Batch", batches)] if is_one else list(cast("Sequence[Batch]", batches))


def joined(batches: Batches) -> list[TextExample]:
    """Return the examples of all batches."""
    return [example for batch in as_batches(batches) for example in batch]


def _examples(task: Task, split: str, lengths: Mapping[str, int] | None, shuffle: bool, seed: int) -> Iterator[Example]:
    pipeline = task.pipeline(split, lengths, seed)
    if pipeline.pieces:
        raise UserError(f"Task {task.name!r} joins its examples, so it has no pairs of inputs and targets.")
    order = Order(len(pipeline), seed, shuffle)
    for position in range(len(pipeline)):
        yield from pipeline.outputs(*order(position))


def _value(task: Task, example: Example, feature: str, as_text: bool) -> Any:
    """Return a feature as text, if possible that before tokenization, or as ids."""
    if not as_text:
        return np.asarray(example[feature]).tolist()
    text = example.get(f"{feature}_pretokenized")
    return task.output_features[feature].vocabulary.decode(example[feature]) if text is None else text

"""`t5x.load` and `t5x.pipeline`: a model in Python, and a replacement for the pipelines that transformers 5 removed."""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x.apps.answering.answers import AnswerMethods
from t5x.apps.ranking.reranker import RankMethods
from t5x.checkpoints.convert import convert
from t5x.files.untrusted import parse_json
from t5x.inference import loaded
from t5x.inference.generation import HUGGINGFACE_NAMES
from t5x.inference.loaded import Generation, LoadedModel, read_inputs
from t5x.partitioning.multiprocess import enable_compilation_cache

__all__ = ["Generation", "Model", "TransformersPipeline", "load", "pipeline"]

# {task: field of the results}
_TASKS = {
    "text2text-generation": "generated_text",
    "summarization": "summary_text",
    "translation": "translation_text",
}
_CONFIG = "generation_config.json"
_CONFIGURED = (
    *HUGGINGFACE_NAMES, "do_sample", "temperature", "top_k", "top_p", "length_penalty", "repetition_penalty",
)  # fmt: skip


class Model(RankMethods, AnswerMethods, LoadedModel):
    """A `LoadedModel` that also ranks passages, answers questions and saves itself."""

    def save(self, path: str, *, to: str = "hf", dtype: str | None = None, overwrite: bool = False) -> None:
        """Save the model to a new directory.

            model.save("flan")                  # for transformers; t5x loads it too

        Args:
          to: `hf` (Hugging Face), `t5x` (ours) or `native` (T5X).
          dtype: `float32` or `bfloat16` for the parameters; None keeps theirs.
          overwrite: replace an existing directory.
        """
        convert(self.source, path, to=to, dtype=dtype, overwrite=overwrite)


def load(model_dir: str, **options: Any) -> Model:
    """Load the model of a checkpoint of any format, or of a MODEL_DIR, to generate, score, rank and answer.

        model = t5x.load("runs/demo")
        print(model.generate("the third of March '97").text)

    Args:
      model_dir: a path, an id of the Hugging Face Hub (`google/flan-t5-small`), or another name of a checkpoint: see
        `t5x.checkpoints.names`.
      options: `vocabulary`, `dtype`, `device` and `partitioner`, see `t5x.inference.loaded.load`.
    """
    enable_compilation_cache()
    model = loaded.load(model_dir, **options, model_class=Model)
    assert isinstance(model, Model)
    return model


def pipeline(task: str, model: str | LoadedModel, **options: Any) -> "TransformersPipeline":
    """Return a function with the arguments and results of transformers' pipeline of that name.

        pipe = t5x.pipeline("text2text-generation", model="google/flan-t5-small")
        pipe("translate English to German: Good morning.")[0]["generated_text"]

    Args:
      task: `text2text-generation`, `summarization` or `translation`.
      model: a name for `t5x.load`, or a loaded model.
      options: options of `t5x.load`.
    """
    if task not in _TASKS:
        raise UserError(f"The pipeline {task!r} does not exist here; choose one of {', '.join(_TASKS)}.")
    return TransformersPipeline(load(model, **options) if isinstance(model, str) else model, _TASKS[task])


class TransformersPipeline:
    """A model that returns dictionaries, like transformers' pipelines.

    Decoding options of the checkpoint's generation_config.json apply unless they are given.

    Args:
      model: the model.
      field: the key of each generated text.
    """

    def __init__(self, model: LoadedModel, field: str):
        self.model = model
        self._field = field
        try:
            stated = parse_json(model.source.huggingface_files.get(_CONFIG, b"{}"))
        except ValueError as error:
            raise UserError(f"{_CONFIG} of {model.source.path} is damaged: {error}.") from error
        self._defaults = {name: stated[name] for name in _CONFIGURED if stated.get(name) is not None}

    def __call__(self, inputs: str | Sequence[str], **options: Any) -> list[Any]:
        """Return [{field: text}, …] for a string; for a list, one such entry (or list, of several outputs) per input.

        Args:
          options: arguments of `LoadedModel.generate`, by Hugging Face's names or ours.
        """
        passed = {HUGGINGFACE_NAMES.get(name, name) for name in options}
        defaults = {name: x for name, x in self._defaults.items() if HUGGINGFACE_NAMES.get(name, name) not in passed}
        texts, is_single = read_inputs(inputs)
        results = [self._as_fields(outputs) for outputs in self.model.generate(texts, **defaults | options)]
        return results if not is_single or isinstance(results[0], Mapping) else results[0]

    def _as_fields(self, outputs: Generation | list[Generation]) -> Any:
        if isinstance(outputs, Generation):
            return {self._field: outputs.text}
        return [{self._field: each.text} for each in outputs]

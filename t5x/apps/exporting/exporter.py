"""`t5x export`: write an export, compare it with the original, and refuse it if they differ."""

import contextlib
import errno
import glob
import os
from collections.abc import Iterator, Sequence

from t5x._runtime.errors import UserError, located
from t5x.apps.exporting import external, saved_model, stablehlo
from t5x.apps.exporting.checking import Sample, report_loss
from t5x.apps.exporting.programs import DEFAULT_PLATFORMS, Exportable
from t5x.files import atomic, locks
from t5x.files.directory import make_directory
from t5x.files.remote import is_remote
from t5x.inference.generation import Decoding
from t5x.inference.loaded import load

FORMATS = ("savedmodel", "stablehlo", "hf", "ctranslate2", "onnx")
QUANTIZED = ("savedmodel", "stablehlo", "ctranslate2")  # formats with int8 weights


@contextlib.contextmanager
def new_destination(path: str) -> Iterator[str]:
    """Yield a directory that becomes `path` if nothing is raised."""
    if is_remote(path):
        raise UserError(f"{path} is remote: export to a local directory, and copy it.")
    if os.path.lexists(path):
        raise UserError(f"{path} exists already. Choose another destination, or remove it.")
    with located(f"{path} cannot be created"):
        make_directory(os.path.dirname(os.path.abspath(path)), "its directory")
    _remove_unfinished(path)
    try:
        with atomic.new_directory(path) as directory, locks.locked(directory):
            yield directory
    except Exception as error:  # TensorFlow and safetensors have exceptions of their own for a full disk
        full = os.strerror(errno.ENOSPC)
        if isinstance(error, UserError) or full not in str(error):
            raise
        raise UserError(f"{path} cannot be written: {full}. Free disk space, then start again.") from error


def _remove_unfinished(path: str) -> None:
    """Remove the temporaries of killed exports to `path`, which no process holds."""
    for temporary in glob.glob(f"{glob.escape(path)}.tmp-*"):
        if atomic.is_temporary(temporary):
            with contextlib.suppress(OSError), locks.locked(temporary, wait=False):
                atomic.remove_tree(temporary)


def export(
    model: str,
    destination: str,
    format: str,
    *,
    vocabulary: str | None = None,
    dtype: str | None = None,
    int8: bool = False,
    sample: Sample | None = None,
    max_input_length: int = 512,
    max_length: int = 128,
    decoding: Decoding | None = None,
    platforms: Sequence[str] = DEFAULT_PLATFORMS,
    token_ids: bool = False,
    batch_size: int | None = None,
    warmup: Sequence[str] = (),
) -> None:
    """Export a model, and refuse an export that computes something else.

        export("google/flan-t5-small", "models/flan/1", "savedmodel")

    Args:
      model: a checkpoint of any format, or a MODEL_DIR.
      destination: the directory to create. It appears when the export is complete and was checked.
      format: one of FORMATS.
      vocabulary, dtype: see `t5x.load`; the dtype is float32 unless given.
      int8: store matrices as int8, and print what that changes.
      sample: inputs, and targets on which the change of the loss is measured; None uses built-in ones.
      max_input_length: longer inputs are truncated; programs pad all inputs to it.
      max_length: maximum number of generated tokens, and of tokens of a target.
      decoding: how to generate; None is greedy.
      platforms: where StableHLO programs can run.
      token_ids: a SavedModel takes and returns token ids, not strings.
      batch_size: the only batch size of a SavedModel; None is any.
      warmup: inputs that TensorFlow Serving runs before a SavedModel is ready.
    """
    if format not in FORMATS:
        raise UserError(f"--format is {format!r}: it must be one of {', '.join(FORMATS)}.")
    if int8 and format not in QUANTIZED:
        raise UserError(f"--int8 is for {', '.join(QUANTIZED)}; readers of {format} quantize as they load. Remove it.")
    sample = sample or Sample()
    with new_destination(destination) as directory:
        if format == "hf":
            differences = external.write_huggingface(directory, model, vocabulary, sample, max_length)
        elif format == "onnx":
            differences = external.write_onnx(directory, model, vocabulary, sample, max_length)
        elif format == "ctranslate2":
            differences = external.write_ctranslate2(directory, model, vocabulary, sample, max_length, int8=int8)
        else:
            loaded = load(model, vocabulary=vocabulary, dtype=dtype or "float32")
            exportable = Exportable(loaded, decoding or Decoding(), max_input_length, max_length)
            if int8:
                before = sample.loss(loaded)
                exportable.quantize()
                print(report_loss(before, sample.loss(loaded), len(sample.texts)))
            if format == "stablehlo":
                differences = stablehlo.write(directory, exportable, platforms)
            else:
                differences = saved_model.write(
                    directory, exportable, token_ids=token_ids, rows=batch_size, warmup=warmup,
                    name=os.path.basename(os.path.dirname(os.path.abspath(destination))),
                )  # fmt: skip
    print(f"checked against the original: {differences}")
    print(f"wrote {destination} ({format})")

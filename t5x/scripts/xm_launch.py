"""Launch a run on Vertex AI with XManager, with the flags of T5X's launcher.

  pip install xmanager
  xmanager launch t5x/scripts/xm_launch.py -- \\
    --gin_file=t5x/examples/t5/t5_1_1/examples/base_wmt_from_scratch.gin \\
    --model_dir=gs://bucket/runs/mine --tfds_data_dir=gs://bucket/data

XManager builds deploy/Dockerfile (with Docker here, or else with Cloud Build) and submits the image to TPU v2, the
generation that it knows on Vertex AI. For newer TPUs, use `t5x launch vertex`, which needs no XManager.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

_ROOT = Path(__file__).resolve().parents[2]
_UNSUPPORTED = ("clone_github", "copybara_config", "copybara_workflow", "copybara_origin")


def define_flags() -> None:
    """Define T5X's flags, and --image."""
    flags.DEFINE_string("name", "t5x", "name of the experiment")
    flags.DEFINE_enum("run_mode", "train", ["train", "eval", "infer"], "what to run")
    flags.DEFINE_string("model_dir", None, "gs://… for checkpoints and logs", required=True)
    flags.DEFINE_string("tfds_data_dir", None, "gs://… of TensorFlow Datasets")
    flags.DEFINE_list("seqio_additional_cache_dirs", [], "gs://… of task caches")
    flags.DEFINE_list("project_dirs", [], "directories of your gin files and modules, to copy into the image")
    flags.DEFINE_list("pip_install", [], "packages to install in the image")
    flags.DEFINE_integer("tpu_cores", 8, "cores of TPU v2: 8, or a multiple of 32")
    flags.DEFINE_string("image", None, "an image that exists, instead of building one")
    flags.DEFINE_boolean("clone_github", False, "not supported: the image has the t5x of this directory")
    for name in _UNSUPPORTED[1:]:
        flags.DEFINE_string(name, None, "not supported")


def command() -> list[str]:
    """Return the t5x command, without the gin flags."""
    args = flags.FLAGS
    macro = {"train": "MODEL_DIR", "eval": "EVAL_OUTPUT_DIR", "infer": "INFER_OUTPUT_DIR"}[args.run_mode]
    words = [args.run_mode, f"--gin.{macro}={args.model_dir.rstrip('/')}/logs"]  # as T5X does
    if args.tfds_data_dir:
        words.append(f"--tfds_data_dir={args.tfds_data_dir}")
    if args.seqio_additional_cache_dirs:
        words.append(f"--seqio_additional_cache_dirs={','.join(args.seqio_additional_cache_dirs)}")
    return words


def dockerfile() -> str:
    """Return deploy/Dockerfile for TPUs, with the user's projects and packages."""
    text = (_ROOT / "deploy/Dockerfile").read_text().replace("ARG EXTRAS=serve,gcs", "ARG EXTRAS=gcs,tpu,tfds")
    lines = [f"COPY {directory} {os.path.basename(directory)}" for directory in flags.FLAGS.project_dirs]
    if packages := flags.FLAGS.pip_install:
        lines += ["USER root", f"RUN pip install --no-cache-dir {' '.join(packages)}", "USER 10001"]
    return text + "".join(f"{line}\n" for line in lines)


def main(argv: Sequence[str], gin_flags: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"error: {argv[1]!r} is one argument too many.")
    if unsupported := [name for name in _UNSUPPORTED if flags.FLAGS[name].present]:
        sys.exit(f"error: --{unsupported[0]} is not supported: the image has the t5x of this directory. Remove it.")
    if not flags.FLAGS.model_dir.startswith("gs://"):
        sys.exit(f"error: --model_dir is {flags.FLAGS.model_dir}: it must be gs://BUCKET/…")
    try:
        from xmanager import xm, xm_local
    except ImportError as error:
        sys.exit(f"error: {error}. `pip install xmanager`, or use `t5x launch vertex`, which does not need it.")
    executor = xm_local.Vertex(requirements=xm.JobRequirements(tpu_v2=flags.FLAGS.tpu_cores))
    with xm_local.create_experiment(experiment_title=flags.FLAGS.name) as experiment:
        if flags.FLAGS.image:
            packaged = xm.container(executor.Spec(), flags.FLAGS.image)
        else:
            with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile", delete=False) as file:
                file.write(dockerfile())
            packaged = xm.dockerfile_container(executor.Spec(), path=str(_ROOT), dockerfile=file.name)
        [executable] = experiment.package([packaged])
        experiment.add(xm.Job(executable=executable, executor=executor, args=[*command(), *gin_flags]))


def _is_gin(word: str) -> bool:
    return word.startswith(("--gin.", "--gin_file", "--gin_bindings", "--gin_search_paths"))


if __name__ == "__main__":
    define_flags()
    gin_flags = [word for word in sys.argv[1:] if _is_gin(word)]
    app.run(lambda argv: main(argv, gin_flags), [word for word in sys.argv if not _is_gin(word)])

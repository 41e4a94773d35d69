"""Prepares a tiny WMT dataset with TFDS and a Mesh TensorFlow checkpoint, then runs command lines in this process.

    python readme_commands.py JOB.json RESULTS.json

JOB.json: "tfds_data_dir", "translations" ({split: [[English, German]]}), "mesh_tensorflow" ([an .npz file of variables,
the prefix of the checkpoint]), "gin" (directory, files and bindings of a run, whose operative configuration is
written to the last, a path) and "commands" ([name, words, environment variables]). RESULTS.json: {name: exit code}, and
"t5": whether the package t5 and all that it needs are installed.
"""

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from pathlib import Path

import numpy as np


def prepare_wmt(directory, translations):
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():

        class WmtT2tTranslate(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")
            BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en")]  # noqa: RUF012

            def _info(self):
                features = tfds.features.Translation(languages=("de", "en"))
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(pairs) for split, pairs in translations.items()}

            def _generate_examples(self, pairs):
                for number, (english, german) in enumerate(pairs):
                    yield number, {"en": english, "de": german}

    WmtT2tTranslate(data_dir=directory).download_and_prepare()


def save_mesh_tensorflow(values, prefix):
    import tensorflow as tf

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with np.load(values) as variables:
        tensors = {name: tf.constant(variables[name]) for name in variables.files}
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=list(tensors), shape_and_slices=[""] * len(tensors), tensors=list(tensors.values())
    )


def write_operative_config(directory, files, bindings, path):
    """Write the configuration of `train` as T5X does: gin itself reads the files, calls it and prints what was used."""
    import gin

    import t5x.train

    @functools.wraps(t5x.train.train)
    def train(**arguments):
        assert arguments["model"] is not None

    sys.modules["__main__"].train = train
    with contextlib.chdir(directory):
        gin.parse_config_files_and_bindings(files, bindings)
    gin.get_configurable(train)()
    Path(path).write_text(gin.operative_config_str())
    gin.clear_config()


def run(words, variables):
    """Run `python3 SCRIPT ARGUMENTS` and return the exit code."""
    from t5x import configuration

    configuration.clear()
    os.environ.update(variables)
    path = [directory for directory in os.environ.get("PYTHONPATH", "").split(os.pathsep) if directory]
    sys.path[:0] = [directory for directory in path if directory not in sys.path]
    python, script, *arguments = words
    assert python == "python3", words
    sys.argv = [script, *arguments]
    print("\n$", *words, file=sys.stderr, flush=True)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    job_file, results_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    # In a process of its own: what gin registers, it keeps.
    gin = multiprocessing.get_context("fork").Process(target=write_operative_config, args=job["gin"])
    gin.start()
    prepare_wmt(job["tfds_data_dir"], job["translations"])
    save_mesh_tensorflow(*job["mesh_tensorflow"])
    results = {name: run(words, variables) for name, words, variables in job["commands"]}
    gin.join()
    needed = ("t5", "editdistance", "nltk", "pandas", "rouge_score", "sklearn")
    results["t5"] = all(importlib.util.find_spec(name) for name in needed)
    results_file.write_text(json.dumps(results))

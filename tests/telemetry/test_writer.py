import json
import math
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t5x._runtime.errors import UserError
from t5x.checkpoints import ModelDirLock
from t5x.telemetry import MetricWriter
from tests.support.disks import fill


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def events(directory):
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def scalars(directory, tag):
    return [(event.step, event.value) for event in events(directory).Scalars(tag)]


def write_steps(directory, steps, purge_step=None, scale=1.0):
    with MetricWriter(directory, collection="train", purge_step=purge_step) as writer:
        for step in steps:
            writer.write_scalars(step, {"loss": scale * step, "timing/seconds": 0.5})


def test_scalars_and_texts_can_be_read_back(tmp_path):
    with MetricWriter(tmp_path / "new" / "train", collection="train") as writer:
        writer.write_scalars(10, {"loss": np.float32(2.5), "learning_rate/current": 1e-3, "seqs": np.int64(64)})
        writer.write_scalars(np.int32(20), {"loss": np.array(1.5)})
        writer.write_text(0, "config", "a = 1")
    directory = tmp_path / "new" / "train"
    assert lines(directory) == [
        {"step": 10, "loss": 2.5, "learning_rate/current": 1e-3, "seqs": 64},
        {"step": 20, "loss": 1.5},
    ]
    assert scalars(directory, "loss") == [(10, 2.5), (20, 1.5)]
    assert scalars(directory, "seqs") == [(10, 64.0)]
    (text,) = events(directory).Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"a = 1"


def test_flush_makes_events_visible_during_the_run(tmp_path):
    writer = MetricWriter(tmp_path, collection="train")
    writer.write_scalars(1, {"loss": 3.0})
    writer.flush()
    assert scalars(tmp_path, "loss") == [(1, 3.0)]
    writer.close()
    writer.close()


def test_nonfinite_values_are_valid_json(tmp_path):
    with MetricWriter(tmp_path, collection="train") as writer:
        writer.write_scalars(1, {"loss": math.nan, "up": np.float32("inf"), "down": -math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": "nan", "up": "inf", "down": "-inf"}
    assert math.isnan(scalars(tmp_path, "loss")[0][1])


def test_a_resumed_run_leaves_the_same_files_as_an_uninterrupted_one(tmp_path):
    write_steps(tmp_path / "whole", range(10, 60, 10))
    broken = tmp_path / "broken"
    write_steps(broken, range(10, 50, 10), scale=7.0)
    write_steps(broken, range(10, 40, 10), purge_step=0)
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "lo')
    write_steps(broken, range(30, 60, 10), purge_step=20)
    assert (broken / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert scalars(broken, "loss") == scalars(tmp_path / "whole", "loss")
    assert {path.name.split(".")[0] for path in broken.iterdir()} == {"metrics", "events"}


def test_without_purge_step_everything_is_kept(tmp_path):
    write_steps(tmp_path, [10, 20])
    write_steps(tmp_path, [15])
    assert [line["step"] for line in lines(tmp_path)] == [10, 20, 15]


def test_a_killed_process_loses_no_line_that_was_written(tmp_path):
    program = (
        "import os, signal, sys; from t5x.telemetry import MetricWriter\n"
        "writer = MetricWriter(sys.argv[1], collection='train')\n"
        "for step in range(100): writer.write_scalars(step, {'loss': 1.0})\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules), 'slow imports'\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(tmp_path)] == list(range(100))


def test_a_value_that_is_not_a_number_is_rejected_by_name(tmp_path):
    with MetricWriter(tmp_path, collection="train") as writer:
        for value in ("high", [1.0, 2.0], None):
            with pytest.raises(TypeError, match="'loss'"):
                writer.write_scalars(1, {"loss": value})
    assert lines(tmp_path) == []


def test_a_directory_that_cannot_be_created_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/train.*Not a directory"):
        MetricWriter(tmp_path / "file" / "train", collection="train")


def test_a_full_disk_is_a_user_error_and_does_not_hang(tmp_path):
    writer = MetricWriter(tmp_path, collection="train")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=r"metrics\.jsonl .*File too large.*disk space"):
            for step in range(1000):
                writer.write_scalars(step, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < step < 999
    writer.close()


@pytest.mark.parametrize("removed", ["the run", "metrics.jsonl", "events"])
def test_files_removed_during_the_run_are_recreated(tmp_path, caplog, removed):
    run = tmp_path / "run"
    with ModelDirLock(run) as home, MetricWriter(run / "train", collection="train", home=home) as writer:
        writer.on_recreate = lambda: writer.write_text(0, "config", "a = 1")
        writer.write_scalars(1, {"loss": 3.0})
        writer.flush()
        if removed == "the run":
            shutil.rmtree(run)
        else:
            (path,) = (run / "train").glob(f"{removed}*")
            path.unlink()
        for step in (2, 3):
            writer.write_scalars(step, {"loss": 3.0})
        with pytest.raises(UserError, match="in use"):
            ModelDirLock(run)
    kept = {"the run": [2, 3], "metrics.jsonl": [2, 3], "events": [1, 2, 3]}[removed]
    assert [line["step"] for line in lines(run / "train")] == kept
    kept = {"the run": [2, 3], "metrics.jsonl": [1, 2, 3], "events": [2, 3]}[removed]
    assert [step for step, _ in scalars(run / "train", "loss")] == kept
    assert events(run / "train").Tensors("config/text_summary")
    assert caplog.text.count("WARNING") == 1 and str(run / "train" / "metrics.jsonl") in caplog.text


def test_a_run_removed_after_its_last_line_is_recreated_at_the_end(tmp_path):
    recreated = []
    run = tmp_path / "run"
    with ModelDirLock(run) as home, MetricWriter(run / "train", collection="train", home=home) as writer:
        writer.on_recreate = lambda: recreated.append(1)
        shutil.rmtree(tmp_path / "run")
    assert recreated == [1] and lines(tmp_path / "run" / "train") == []


def test_nothing_is_created_while_the_disk_is_missing(tmp_path, caplog):
    run = tmp_path / "disk" / "run"
    with ModelDirLock(run) as home, MetricWriter(run / "train", collection="train", home=home) as writer:
        shutil.rmtree(tmp_path / "disk")
        for step in (1, 2):
            writer.write_scalars(step, {"loss": 3.0})
        assert not (tmp_path / "disk").exists()
        (tmp_path / "disk").mkdir()  # the disk is back
        writer.write_scalars(3, {"loss": 3.0})
    assert [line["step"] for line in lines(run / "train")] == [3]
    assert caplog.text.count("WARNING") == 1


def test_metrics_are_not_mixed_with_those_of_a_run_in_the_same_place(tmp_path):
    run = tmp_path / "run"
    with ModelDirLock(run) as home:
        writer = MetricWriter(run / "train", collection="train", home=home)
        shutil.rmtree(run)
        with ModelDirLock(run) as home, MetricWriter(run / "train", collection="train", home=home) as other:
            other.write_scalars(1, {"loss": 5.0})
            with pytest.raises(UserError, match="in use"):
                writer.write_scalars(9, {"loss": 3.0})
    assert [line["step"] for line in lines(run / "train")] == [1]
    writer.close()


def test_a_full_disk_error_lists_what_may_be_deleted(small_disk):
    run = small_disk / "run"
    place = {"directory": run / "training_eval" / "dates", "collection": "training_eval"}
    with ModelDirLock(run) as home, MetricWriter(**place, home=home) as writer:
        for step in (1, 2):
            (run / f"checkpoint_{step}").mkdir()
            (run / f"checkpoint_{step}" / "state").write_bytes(bytes(5000))
        filler = fill(small_disk)
        with pytest.raises(UserError, match=r"metrics\.jsonl .*No space left") as error:
            for step in range(1000):
                writer.write_scalars(step, {"loss": 1.0})
        filler.unlink()
    assert "you may delete checkpoint_1 (5.0 kB);" in str(error.value)
    assert "checkpoint_2" not in str(error.value)

"""What writes results when the disk is full: one message, nothing lost, and the next run goes on."""

import pytest

from t5x.inference.output import FileOutput
from tests.inference.conftest import VERBS
from tests.support.disks import fill


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_reported_and_the_next_run_resumes(verb, run_verb, small_disk, tmp_path, monkeypatch):
    assert run_verb(verb, tmp_path / "whole").code == 0
    output, write = small_disk / "out", FileOutput.write

    def fills_the_disk(self, lines, record):
        if self._chunks.finished:
            fill(small_disk)
        write(self, lines, record)

    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "write", fills_the_disk)
        full = run_verb(verb, output)
    full.refused("tmp-out/out-chunk00001 cannot be written: No space left on device", "start again")
    assert not output.exists()
    (small_disk / "filler").unlink()
    again = run_verb(verb, output)
    assert again.code == 0 and "resuming after 1 finished chunk(s)" in again.err
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert [path.name for path in small_disk.iterdir()] == ["out"]

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from t5x.telemetry import Progress


class Time:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def on_a_terminal(show):
    """Return what `show(stream)` sends to a terminal of 100 columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        assert stream.isatty()
        show(stream)
        stream.flush()
        os.set_blocking(controller, False)
        sent = b""
        while True:
            try:
                sent += os.read(controller, 65536)
            except BlockingIOError:
                break
    os.close(controller)
    return sent.decode()


@pytest.fixture(autouse=True)
def terminal_type(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_shows_a_bar_with_step_metrics_and_time_left():
    def show(stream):
        with Progress(200, 100, description="train", stream=stream) as progress:
            progress.update(150, loss=2.345678, **{"tokens/s": 34567.8})

    shown = on_a_terminal(show)
    last = [part for part in shown.replace("\n", "").split("\r") if part][-1]
    assert last.startswith("train: ")
    assert "150/200" in last and "left" in last and "loss 2.346" in last and "tokens/s 34,568" in last
    assert len(last) <= 100


def test_a_terminal_with_an_unknown_total():
    def show(stream):
        with Progress(None, stream=stream) as progress:
            progress.update(3, loss=1.5)

    shown = on_a_terminal(show)
    assert "3step" in shown and "loss 1.5" in shown


def test_a_dumb_terminal_shows_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")

    def show(stream):
        with Progress(10, stream=stream) as progress:
            progress.update(1)

    assert on_a_terminal(show) == "step 1/10\r\n"


def test_a_file_gets_occasional_lines():
    time, stream = Time(), io.StringIO()
    with Progress(100, description="train", stream=stream, seconds_between_lines=10, now=time) as progress:
        for step in range(1, 26):
            time.seconds += 1
            progress.update(step, loss=1 / step)
    assert stream.getvalue().splitlines() == [
        "train: step 1/100, loss 1",
        "train: step 11/100, loss 0.09091, 01:29 left",
        "train: step 21/100, loss 0.04762, 01:19 left",
        "train: step 25/100, loss 0.04, 01:15 left",
    ]


def test_the_last_line_is_not_printed_twice():
    stream = io.StringIO()
    progress = Progress(2, initial=1, unit="batch", stream=stream)
    progress.update(2)
    progress.close()
    progress.close()
    assert stream.getvalue() == "batch 2/2\n"


def test_no_update_prints_nothing():
    stream = io.StringIO()
    Progress(10, stream=stream).close()
    assert stream.getvalue() == ""


def test_the_default_stream_is_standard_error(capsys):
    with Progress(2) as progress:
        progress.update(1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "step 1/2\n")

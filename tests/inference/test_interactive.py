"""Interactive use: few compiled programs, and a line out for every line in."""

import json
import os
import pty
import subprocess
import threading

import jax
import numpy as np
import pytest

import t5x
from tests.inference.models import LETTERS
from tests.support.programs import start_python


@pytest.fixture(scope="module")
def compiled():
    """The seconds of each compilation in this process."""
    seconds = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


def random_texts(rng, count):
    return ["".join(rng.choice(list(LETTERS), rng.integers(0, 511))) for _ in range(count)]


@pytest.mark.slow
def test_one_to_eight_inputs_of_any_length_need_three_programs(tiny_t5, compiled, caplog):
    caplog.set_level("INFO", "t5x")
    model, rng = t5x.load(str(tiny_t5)), np.random.default_rng(0)
    for warm_up in (["a"], ["a", "b"], ["a", "b" * 300]):
        model.generate(warm_up, max_length=4)
    assert sorted(r.message.split()[2] for r in caplog.records if r.message.startswith("compiling")) == [
        "1x128", "8x128", "8x512",
    ]  # fmt: skip
    before = len(compiled)
    for _ in range(20):
        model.generate(random_texts(rng, rng.integers(1, 9)), max_length=int(rng.integers(1, 9)))
    assert len(compiled) == before


WAYS = {"greedy": {}, "beams": {"beams": 3, "num_return": 3}, "beams of Hugging Face": {"num_beams": 2}}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.slow
def test_few_inputs_get_what_many_do(tiny_t5, options):
    """Coarse shapes and a maximum length that is data, against a batch of its own shape."""
    model, texts = t5x.load(str(tiny_t5)), random_texts(np.random.default_rng(1), 12)
    many = model.generate(texts, max_length=5, **options)
    few = [result for i in range(0, 12, 4) for result in model.generate(texts[i : i + 4], max_length=5, **options)]
    flat = lambda results: [g for r in results for g in ([r] if isinstance(r, t5x.Generation) else r)]
    assert [g.tokens for g in flat(few)] == [g.tokens for g in flat(many)]
    assert np.allclose([g.score for g in flat(few)], [g.score for g in flat(many)], atol=1e-4)


def test_a_line_typed_at_the_prompt_is_answered_at_once(tiny_t5):
    terminal, stdin = pty.openpty()
    command = ["-m", "t5x", "infer", f"--model={tiny_t5}", "--input=-", "--max_length=4"]
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(*command, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes) as process:
        os.close(stdin)
        limit = threading.Timer(100, process.kill)
        limit.start()
        expected = t5x.load(str(tiny_t5))
        for text in ("abc", "hadcggg"):
            os.write(terminal, f"{text}\n".encode())
            answer = json.loads(process.stdout.readline())
            assert answer["inputs"] == text
            assert answer["prediction"] == expected.generate(text, max_length=4).text
        os.write(terminal, b"\x04")
        assert process.wait() == 0
        limit.cancel()
        assert process.stderr.read().count("> ") == 3
    os.close(terminal)


def test_lines_before_a_bad_one_get_results(tiny_t5):
    command = ["-m", "t5x", "infer", f"--model={tiny_t5}", "--input=-", "--max_length=4"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with start_python(*command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes) as process:
        out, err = process.communicate(b"abc\n\xff\n", 300)
    assert process.returncode == 2 and b"standard input:2" in err
    assert [json.loads(line)["inputs"] for line in out.splitlines()] == ["abc"]

"""A server in the process of the tests, whose batches can be held up: clients that leave, limits, streams, samples."""

import contextlib
import functools
import http.client
import json
import threading
import time

import numpy as np
import pytest
import uvicorn

from t5x.apps.serving.api import Api
from t5x.apps.serving.batched_model import BatchedModel, BatchShape
from t5x.apps.serving.batching import CURRENT_CALL, Batcher, BatchRow, Call
from t5x.apps.serving.served_models import ServedModels, ServerMetrics
from t5x.apps.serving.server import listen
from t5x.apps.serving.settings import ServerSettings
from t5x.inference.generation import Decoding
from t5x.inference.loaded import load
from tests.inference.models import byte_model

PROMPT = "hadcggg"  # its output is longer than the first piece of a stream
VARIED = {"prompt": "b", "max_tokens": 16, "no_repeat_ngram": 2}  # an output without long repetitions


class Service:
    """A server with one row per batch and room for one request.

    Attributes:
      models: its models.
      batches: the shapes of its batches.
      port: where it listens.
    """

    def __init__(self, directory, **settings):
        self.batches: list[BatchShape] = []
        self._after_batch = lambda: None
        self._batcher = Batcher(1, 0.0, self._observe)
        limits = ServerSettings(**{"max_queue": 1, "max_input_length": 32, "max_length": 16, "max_beams": 2} | settings)
        self.models = ServedModels({"tiny": str(directory)}, limits, self._batcher, ServerMetrics())
        self.models.load()
        self._api = Api(self.models, limits, metrics := ServerMetrics(), token=None, is_local=True)
        self._metrics = metrics
        self._held = threading.Event()

    @contextlib.contextmanager
    def running(self):
        with listen("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(self._api.app, lifespan="off", log_config=None, ws="none"))
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                yield self
            finally:
                self._held.set()
                server.should_exit = True
                thread.join()
        self._batcher.close()

    def _observe(self, shape, rows, seconds):
        if isinstance(shape, BatchShape):
            self.batches.append(shape)
            after_batch, self._after_batch = self._after_batch, lambda: None
            after_batch()

    @property
    def model(self):
        return self.models.get(None)[1]

    def waiting(self) -> int:
        return self._batcher.waiting()

    def is_idle(self) -> bool:
        return "t5x_requests_in_progress 0" in self._metrics.text()

    def tokens(self) -> list[float]:
        """Return the numbers of input and output tokens in the metrics."""
        values = dict(line.rsplit(" ", 1) for line in self._metrics.text().splitlines() if not line.startswith("#"))
        return [float(values.get(f"t5x_{kind}_tokens_total", 0)) for kind in ("input", "output")]

    def after_next_batch(self, function) -> None:
        """Call a function after the next batch, before its results are delivered."""
        self._after_batch = function

    def hold(self) -> None:
        """Compute nothing that is queued from now on, until `release`. Returns once this is queued."""
        self._held.clear()
        started = threading.Event()

        def wait(group, rows):
            started.set()
            self._held.wait(60)
            return [None] * len(rows)

        def run():
            CURRENT_CALL.set(Call(60))
            self._batcher.run(wait, [BatchRow("held", {})])

        threading.Thread(target=run, daemon=True).start()
        wait_until(lambda: started.is_set() or self.waiting() == 1)

    def release(self) -> None:
        self._held.set()

    def connect(self, **fields) -> http.client.HTTPConnection:
        """Send a completions request, and leave its response to the caller."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        return connection

    def post(self, path="/v1/completions", **fields) -> tuple[int, dict]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def complete(self, **fields) -> list[dict]:
        """Return the choices of a request."""
        status, content = self.post(**fields)
        assert status == 200, content
        return content["choices"]

    def stream(self, **fields) -> list[dict]:
        """Return the events of a stream."""
        with contextlib.closing(self.connect(stream=True, **fields)) as connection:
            events = connection.getresponse().read().decode().split("\n\n")
        return [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def service(tiny_t5):
    with Service(tiny_t5).running() as running:
        yield running


@pytest.fixture(autouse=True)
def idle(service):
    """Release what a failed test holds."""
    service.batches.clear()
    yield
    service.release()
    wait_until(service.is_idle)


# --- Clients that leave -----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_during_a_stream_frees_its_place(service):
    service.after_next_batch(service.hold)
    connection = service.connect(prompt=PROMPT, max_tokens=16, stream=True)
    first = json.loads(connection.getresponse().readline().removeprefix(b"data: "))["choices"][0]
    assert first["text"] and first["finish_reason"] is None
    wait_until(lambda: service.waiting() == 1)  # the next piece is queued
    assert service.post(prompt="b", max_tokens=4)[0] == 429
    connection.close()
    wait_until(service.is_idle)
    service.release()
    assert service.post(prompt="b", max_tokens=4)[0] == 200
    assert len(service.batches) == 2, "the next piece was computed for nobody"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_the_queue_frees_its_place(service, stream):
    service.hold()
    wait_until(lambda: service.waiting() == 0)
    connection = service.connect(prompt=PROMPT, max_tokens=16, stream=stream)
    wait_until(lambda: service.waiting() == 1)
    assert service.post(prompt="b", max_tokens=4)[0] == 429
    connection.close()
    wait_until(service.is_idle)
    service.release()
    assert service.post(prompt="b", max_tokens=4)[0] == 200
    assert len(service.batches) == 1, "a batch was computed for nobody"


def test_a_stream_that_fails_ends_with_the_error(service, monkeypatch):
    service.after_next_batch(lambda: monkeypatch.setattr(service.model.engine, "params", None))
    *pieces, last = service.stream(prompt=PROMPT, max_tokens=16)
    assert len(pieces) == 1 and last["error"]["type"] == "server_error" and last["error"]["message"]
    monkeypatch.undo()
    assert service.post(prompt="b", max_tokens=4)[0] == 200


# --- Ends of outputs --------------------------------------------------------------------------------------------------


def text_of(pieces) -> str:
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def test_a_stop_string_between_two_pieces_of_a_stream_is_not_sent(service):
    (whole,) = service.complete(**VARIED)
    stop = whole["text"][6:10]  # the first piece ends within it
    assert whole["text"].index(stop) == 6
    pieces = service.stream(**VARIED, stop=stop)
    assert text_of(pieces) == whole["text"][:6] == service.complete(**VARIED, stop=stop)[0]["text"]
    assert len(pieces) > 1 and pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stream_computes_nothing_after_the_end_of_its_output(service):
    (event,) = service.stream(prompt="abc", max_tokens=16)  # EOS at once
    assert event["choices"][0]["finish_reason"] == "stop" and len(service.batches) == 1


def test_an_output_ends_before_the_first_of_several_stop_strings(service):
    (whole,) = service.complete(**VARIED)
    early, late = whole["text"][2:4], whole["text"][8:10]
    assert whole["text"].index(early) == 2 and whole["text"].index(late) == 8
    for stop in ([late, early], [early, late]):
        assert service.complete(**VARIED, stop=stop)[0]["text"] == whole["text"][:2]


def test_every_eos_of_a_model_stops_an_output(service, tmp_path):
    (whole,) = service.complete(**VARIED)
    other_eos = whole["text"][8]
    directory = byte_model(tmp_path / "tiny")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, ord(other_eos) + 3]}))
    with Service(directory).running() as other:
        (choice,) = other.complete(**VARIED)
        assert (choice["text"], choice["finish_reason"]) == (whole["text"].partition(other_eos)[0], "stop")
        pieces = other.stream(**VARIED)
        assert text_of(pieces) == choice["text"] and pieces[-1]["choices"][0]["finish_reason"] == "stop"
        (limited,) = other.complete(**VARIED | {"max_tokens": 6})
        assert whole["text"].startswith(limited["text"]) and limited["finish_reason"] == "length"


# --- Samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_without_a_seed_differ(service):
    choices = service.complete(prompt=["abc"] * 5, max_tokens=16, temperature=2.0)
    assert len({choice["text"] for choice in choices}) > 1
    assert service.complete(prompt=["abc"] * 5, max_tokens=16, temperature=2.0) != choices


def test_a_sample_depends_on_its_seed_and_index_only(tiny_t5):
    """Not on the row, the neighbours, their limits and lengths, or the length to which inputs are padded."""
    settings, batcher = ServerSettings(max_input_length=64, max_length=16), Batcher(4, 0.0, lambda *_: None)
    model = load(str(tiny_t5), model_class=functools.partial(BatchedModel, batcher=batcher, settings=settings))
    batcher.close()

    def row(text="abc", seed=5, index=7, max_length=5):
        values = {"max_length": max_length, "seed": seed, "temperature": 1.3, "top_k": 0, "top_p": 0.0}
        return BatchRow(None, {"inputs": model.tokenize(text), "targets": []}, values, index)

    def samples(*rows, inputs=32):
        shape = BatchShape("generate", inputs, 16, Decoding(temperature=1.0))
        return [decodes[0].tolist() for decodes, _ in model.compute(shape, rows)]

    (alone,) = samples(row())
    assert np.count_nonzero(alone) == 5  # its limit
    assert samples(row("h" * 30, seed=6, max_length=16), row("", seed=6), row(index=8), row())[3] == alone
    assert samples(row(), inputs=64) == [alone] and samples(row(), row()) == [alone, alone]
    assert alone not in samples(row(seed=6), row(index=8))


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_an_input_or_target_of_just_the_allowed_length_is_accepted(service):
    longest = "a" * 31  # and EOS
    assert service.post(prompt=longest, max_tokens=1)[0] == 200
    assert service.post("/score", input="a", target=longest)[0] == 200
    status, content = service.post(prompt=longest + "a", max_tokens=1)
    assert status == 400 and "33 tokens, more than 32" in content["error"]["message"]
    status, content = service.post("/score", input="a", target=longest + "a")
    assert status == 400 and "33 tokens, more than 32" in content["error"]["message"]
    assert service.post("/score", input="a", target=longest + "a", truncate=True)[0] == 200


def test_the_tokens_of_inputs_and_outputs_are_counted(service):
    before = service.tokens()
    _, content = service.post(prompt=PROMPT, max_tokens=16)
    counts = len(PROMPT) + 1, 16
    assert content["usage"] == {"prompt_tokens": counts[0], "completion_tokens": 16, "total_tokens": sum(counts)}
    assert [after - number for after, number in zip(service.tokens(), before, strict=True)] == list(counts)


def test_a_context_of_just_the_allowed_number_of_windows_is_answered(tiny_t5):
    with Service(tiny_t5, max_documents=2).running() as other:
        for words in range(4, 24):
            status, content = other.post("/answer", question="a", context="b " * words, max_tokens=1)
            if status != 200:
                break
    assert words > 4 and "needs 3 windows, more than 2" in content["error"]["message"]

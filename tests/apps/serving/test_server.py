"""A server as its clients see it: results, refusals, hostile requests, signals."""

import base64
import concurrent.futures
import json
import signal
import socket
import threading
import time

import httpx
import numpy as np
import pytest

import t5x
from t5x.apps.serving.server import listen
from tests.apps.serving.servers import TOKEN, Server
from tests.inference.models import byte_model, texts

INPUTS = [text for text in texts(20, seed=1) if text.strip()][:12]


@pytest.fixture(scope="module")
def loaded(model):
    """The same model without a server."""
    return t5x.load(str(model))


def requests() -> list[tuple[str, dict]]:
    """Requests of every kind, with inputs of two length buckets."""
    made: list[tuple[str, dict]] = []
    for i, text in enumerate(INPUTS):
        long = text + " abcdefgh" * 3
        made += [
            ("/v1/completions", {"prompt": text, "max_tokens": 5 + i}),
            ("/v1/completions", {"prompt": [long, text], "max_tokens": 6}),
            ("/v1/completions", {"prompt": text, "max_tokens": 8, "temperature": 0.5 + i / 10, "seed": i}),
            ("/v1/rerank", {"query": "ab", "documents": [text, long, "hg"]}),
            ("/v1/embeddings", {"input": [text, long]}),
        ]
        if i < 4:
            made += [
                ("/v1/completions", {"prompt": text, "max_tokens": 8, "beams": 3, "n": 2}),
                ("/score", {"input": text, "target": ["abc", "gh"]}),
                ("/answer", {"question": "ab", "context": long, "max_tokens": 6}),
            ]
    return made


def content(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return {name: value for name, value in response.json().items() if name not in ("id", "created")}


def test_each_response_equals_that_of_a_lone_request(server: Server):
    def batches(client) -> float:
        values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
        return float(values.get('t5x_batches_total{kind="generate"}', 0))

    with server.client() as client:
        asked = requests()
        start = batches(client)
        lone = [content(client.post(path, json=fields)) for path, fields in asked]
        middle = batches(client)
        order = np.random.default_rng(0).permutation(len(asked))
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            together = threads.map(lambda i: client.post(asked[i][0], json=asked[i][1]), order)
            found = dict(zip(order, together, strict=True))
        end = batches(client)
    assert [content(found[i]) for i in range(len(asked))] == lone
    assert end - middle < middle - start  # they were computed together


@pytest.mark.slow
def test_outputs_are_those_of_the_python_api(server: Server, loaded):
    def choices(**fields):
        return server.post("/v1/completions", **fields).json()["choices"]

    greedy = choices(prompt=INPUTS, max_tokens=9)
    for choice, made in zip(greedy, loaded.generate(INPUTS, max_length=9), strict=True):
        assert choice["text"] == made.text and choice["score"] == pytest.approx(made.score, abs=1e-4)
        assert choice["finish_reason"] == ("stop" if made.tokens[-1] == 1 else "length")
    for penalty in (None, 1.5):
        beams = choices(prompt=INPUTS[0], max_tokens=8, beams=3, n=3, length_penalty=penalty)
        expected = loaded.generate(INPUTS[0], max_length=8, beams=3, num_return=3, length_penalty=penalty)
        assert [choice["text"] for choice in beams] == [made.text for made in expected]
        assert [choice["score"] for choice in beams] == pytest.approx([made.score for made in expected], abs=1e-4)
    sampled = choices(prompt=INPUTS[:3], max_tokens=8, temperature=0.9, seed=4)
    expected = loaded.generate(INPUTS[:3], max_length=8, temperature=0.9, seed=4)
    assert [choice["text"] for choice in sampled] == [made.text for made in expected]
    scored = server.post("/score", input=INPUTS[0], target=["abc", "gh"]).json()["data"]
    assert [one["score"] for one in scored] == pytest.approx(
        loaded.score([(INPUTS[0], "abc"), (INPUTS[0], "gh")]), abs=1e-4
    )
    answer = server.post("/answer", question="ab", context="cd ef gh", max_tokens=6).json()
    expected = loaded.answer("ab", "cd ef gh", max_length=6, max_input_length=64, stride=16)
    assert (answer["answer"], answer["start"], answer["end"]) == (expected.text, expected.start, expected.end)


CONSTRAINED = [
    {"max_new_tokens": 12, "min_length": 9, "repetition_penalty": 1.3},
    {"max_new_tokens": 12, "min_new_tokens": 4},
    {"max_new_tokens": 12, "repetition_penalty": 0.7},
    {"max_new_tokens": 12, "no_repeat_ngram_size": 1},
    {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "min_length": 5, "repetition_penalty": 1.5},
    {"max_new_tokens": 8, "beams": 2, "choices": ["abc", "hg", "b"]},
    {"max_new_tokens": 8, "do_sample": True, "top_p": 0.8, "seed": 3, "min_length": 6},
]


@pytest.mark.slow  # decoding/test_constraints.py
def test_constraints_are_those_of_the_python_api_also_in_common_batches(server: Server, loaded):
    plain = loaded.generate(INPUTS, max_length=12)
    lengths = dict(zip(INPUTS, [len(made.tokens) for made in plain], strict=True))
    inputs = sorted(INPUTS, key=lengths.get)[-3:]
    with concurrent.futures.ThreadPoolExecutor(len(CONSTRAINED)) as threads:
        found = list(threads.map(lambda each: server.post("/v1/completions", prompt=inputs, **each), CONSTRAINED))
    for fields, response in zip(CONSTRAINED, found, strict=True):
        assert response.status_code == 200, response.text
        made = loaded.generate(inputs, **fields)
        expected = [one for each in made for one in (each if isinstance(each, list) else [each])]
        assert [choice["text"] for choice in response.json()["choices"]] == [one.text for one in expected], fields
        scores = [choice["score"] for choice in response.json()["choices"]]
        assert scores == pytest.approx([one.score for one in expected], abs=1e-4), fields
    plain = [made.text for made in loaded.generate(inputs, max_length=12)]
    for response in found[:4]:  # each constraint changes something
        assert [choice["text"] for choice in response.json()["choices"]] != plain


def test_rankings_have_the_shapes_of_jina_cohere_and_tei(server: Server, loaded):
    passages = [*INPUTS[:5], "hg"]
    ranked = loaded.rank("ab", passages, labels="a,b", template="{query} {document}", max_length=64)
    order = [found.index for found in ranked]
    probabilities = pytest.approx([np.exp(found.score) for found in ranked], abs=1e-5)
    jina = server.post("/v1/rerank", query="ab", documents=passages, return_documents=True).json()["results"]
    assert [one["index"] for one in jina] == order and [one["relevance_score"] for one in jina] == probabilities
    assert [one["document"]["text"] for one in jina] == [passages[i] for i in order]
    cohere = server.post("/v2/rerank", model="tiny", query="ab", documents=passages, top_n=2).json()["results"]
    assert [one["index"] for one in cohere] == order[:2]
    tei = server.post("/rerank", query="ab", texts=passages).json()
    assert [one["index"] for one in tei] == order and [one["score"] for one in tei] == probabilities
    best = server.post("/v1/rerank", query="ab", documents=passages, top_n=3).json()["results"]
    assert [one["index"] for one in best] == order[:3]
    raw = server.post("/rerank", query="ab", texts=passages, raw_scores=True).json()
    logits = pytest.approx([found.true_logit - found.false_logit for found in ranked], abs=1e-4)
    assert [one["score"] for one in raw] == logits


def test_embeddings_are_the_normalized_mean_of_the_encoder(server: Server, model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.T5EncoderModel.from_pretrained(model).eval()
    data = server.post("/v1/embeddings", input=INPUTS[:3]).json()["data"]
    packed = server.post("/v1/embeddings", input=INPUTS[:3], encoding_format="base64").json()["data"]
    tei = server.post("/embed", inputs=INPUTS[:3]).json()
    for text, one, in_bytes, of_tei in zip(INPUTS, data, packed, tei, strict=False):
        ids = torch.tensor([[byte + 3 for byte in text.encode()] + [1]])
        with torch.no_grad():
            mean = reference(ids).last_hidden_state[0].mean(0)
        expected = (mean / mean.norm()).numpy()
        assert one["embedding"] == pytest.approx(expected, abs=1e-5)
        assert np.frombuffer(base64.b64decode(in_bytes["embedding"]), "<f4").tolist() == one["embedding"] == of_tei


def test_a_stream_is_the_whole_output_in_pieces(server: Server):
    ends = [choice["text"] for choice in server.post("/v1/completions", prompt=INPUTS, max_tokens=40).json()["choices"]]
    fields = {"prompt": max(zip(ends, INPUTS, strict=True), key=lambda pair: len(pair[0]))[1], "max_tokens": 40}
    whole = server.post("/v1/completions", **fields).json()
    with server.client() as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        sent = client.post("/v1/completions", json=fields | options)
    *events, done, _ = sent.text.split("\n\n")
    assert done == "data: [DONE]" and sent.headers["content-type"].startswith("text/event-stream")
    *pieces, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert len(pieces) > 1 and usage["usage"] == whole["usage"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    last = pieces[-1]["choices"][0]
    assert (last["finish_reason"], last["score"]) == tuple(whole["choices"][0][n] for n in ("finish_reason", "score"))
    stopped = server.post("/v1/completions", **fields, stop=whole["choices"][0]["text"][9:11]).json()["choices"][0]
    assert whole["choices"][0]["text"].startswith(stopped["text"]) and stopped["finish_reason"] == "stop"


REFUSED = {
    "no JSON": ("/v1/completions", b"{", 400),
    "bytes that are no text": ("/v1/completions", b"\xff\xfe\x00", 400),
    "nothing": ("/v1/completions", b"", 400),
    "a list": ("/v1/completions", b"[]", 400),
    "a misspelt field": ("/v1/completions", b'{"promt": "x"}', 400),
    "a wrong type": ("/v1/completions", b'{"prompt": 3}', 400),
    "NaN": ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400),
    "a huge number": ("/v1/completions", b'{"prompt": "x", "seed": 1e999}', 400),
    "a number of 10,000 digits": ("/v1/completions", b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", 400),
    "a surrogate": ("/v1/completions", b'{"prompt": "\\ud800"}', 400),
    "deep nesting": ("/v1/completions", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    "too many tokens wanted": ("/v1/completions", b'{"prompt": "x", "max_tokens": 65}', 400),
    "too long an input": ("/v1/completions", json.dumps({"prompt": "x" * 100}).encode(), 400),
    "samples and beams": ("/v1/completions", b'{"prompt": "x", "beams": 2, "temperature": 1}', 400),
    "two names of a field": ("/v1/completions", b'{"prompt": "x", "max_tokens": 2, "max_new_tokens": 3}', 400),
    "a minimum above the maximum": ("/v1/completions", b'{"prompt": "x", "max_tokens": 4, "min_length": 5}', 400),
    "choices that are too long": ("/v1/completions", b'{"prompt": "x", "max_tokens": 2, "choices": ["abc"]}', 400),
    "a penalty of OpenAI": ("/v1/completions", b'{"prompt": "x", "presence_penalty": 0.5}', 400),
    "an echo of OpenAI": ("/v1/completions", b'{"prompt": "x", "echo": true}', 400),
    "a number in a string": ("/v1/completions", b'{"prompt": "x", "max_tokens": "3"}', 400),
    "an unknown model": ("/v1/completions", b'{"prompt": "x", "model": "gpt"}', 404),
    "a path as a model": ("/v1/completions", b'{"prompt": "x", "model": "../../../../etc/passwd"}', 404),
    "10,000 documents": ("/v1/rerank", json.dumps({"query": "a", "documents": ["b"] * 10_000}).encode(), 400),
    "a large body": ("/v1/rerank", b" " * 300_000, 413),
    "an empty query": ("/v1/rerank", b'{"query": " ", "documents": ["b"]}', 400),
    "no passage": ("/answer", b'{"question": "a", "context": " "}', 400),
    "other numbers of targets": ("/score", b'{"input": ["a", "b"], "target": "c"}', 400),
    "a page that is not there": ("/etc/passwd", b"{}", 404),
    "a path that climbs": ("/../../../../etc/passwd", b"{}", 404),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_gets_one_message(case, server: Server):
    path, body, status = REFUSED[case]
    with server.client(headers={"Content-Type": "application/json"}) as client:
        response = client.post(path, content=body)
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert message and len(message) < 400 and "Traceback" not in message
    server.assert_well()


def test_strange_texts_are_answered(server: Server):
    for text in ("\x00", "a\x00b", "", " ", "\u202e\ufffe", "😀" * 12, "</s><pad>"):
        assert server.post("/v1/completions", prompt=text, max_tokens=4).status_code == 200
        assert server.post("/rerank", query="a", texts=[text]).status_code == 200
    server.assert_well()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_responses_do_not_wait_for_acknowledgements(host):
    with listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_only_the_token_gives_access(server: Server):
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer"}):
        for path in ("/v1/completions", "/metrics", "/v1/models"):
            answer = httpx.request("POST" if "comp" in path else "GET", server.url + path, headers=header)
            assert answer.status_code == 401 and TOKEN not in answer.text
    for path in ("/", "/health", "/ready", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200
    text = httpx.post(f"{server.url}/v1/completions", content=b"{}", headers={"Authorization": f"Bearer {TOKEN}"})
    assert text.status_code == 415  # what a form of another web page could send


def test_slow_and_dropped_clients_do_not_block_others(server: Server):
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\n"
    slow = [socket.create_connection((host, port)) for _ in range(60)]
    for i, each in enumerate(slow):
        each.sendall((head if i % 2 else head + "Content-Length: 100\r\n\r\n{").encode())
    body = json.dumps({"prompt": "abc", "max_tokens": 64}).encode()
    for _ in range(5):  # with the half of the slow ones that have sent a header, below --max_queue
        with socket.create_connection((host, port)) as dropped:
            dropped.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    server.assert_well()
    slow[0].settimeout(10)
    assert b" 408 " in slow[0].recv(1000)
    for each in slow:
        each.close()
    server.assert_well()


@pytest.mark.parametrize("clients", [120, pytest.param(1040, marks=pytest.mark.slow)])
def test_excess_requests_get_429_with_retry_after(clients, server: Server):
    with server.client(limits=httpx.Limits(max_connections=None)) as client:
        fields = {"prompt": ["abc"] * 50, "max_tokens": 64}
        with concurrent.futures.ThreadPoolExecutor(clients) as threads:
            found = list(threads.map(lambda _: client.post("/v1/completions", json=fields), range(clients)))
    refused = [response for response in found if response.status_code == 429]
    assert refused and all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert {response.status_code for response in found} == {200, 429}
    server.assert_well()


def test_a_reload_drops_no_request_and_changes_the_model(server: Server, model, tmp_path):
    before = server.post("/v1/completions", prompt=INPUTS[:3], max_tokens=9).json()["choices"]
    stop, failures = threading.Event(), []

    def ask():
        with server.client() as client:
            while not stop.is_set():
                if client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 9}).status_code != 200:
                    failures.append(1)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    weights = (model / "model.safetensors").read_bytes()
    try:
        (model / "model.safetensors").write_bytes(b"broken")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "was not reloaded" in server.log.read_text())
        assert server.post("/v1/completions", prompt=INPUTS[:3], max_tokens=9).json()["choices"] == before
        other = byte_model(tmp_path / "other", seed=8)
        (model / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "was reloaded" in server.log.read_text())
        after = server.post("/v1/completions", prompt=INPUTS[:3], max_tokens=9).json()["choices"]
        expected = t5x.load(str(other)).generate(INPUTS[:3], max_length=9)
        assert [choice["text"] for choice in after] == [made.text for made in expected]
        assert after != before
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        (model / "model.safetensors").write_bytes(weights)
    assert not failures


def test_sigterm_answers_accepted_requests(server: Server):
    """The last test of this server."""
    accepted, refused = [], []
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            try:
                response = server.post("/v1/completions", prompt=["abc"] * 8, max_tokens=64)
            except (httpx.ConnectError, ConnectionResetError):  # it does not listen any more
                refused.append(1)
                return
            accepted.append(response.status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: accepted)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    stop.set()
    for thread in threads:
        thread.join()
    assert accepted and set(accepted) == {200} and refused
    assert "all requests are answered" in server.log.read_text()


def wait_for(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)

"""Clients that others wrote, unchanged. Those that the test environment does not have are skipped."""

import json
import subprocess
import sys

import httpx
import pytest

from tests.apps.serving.servers import TOKEN, Server


@pytest.mark.slow
def test_the_tei_client_of_huggingface_hub_embeds(server: Server):
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=f"{server.url}/embed", token=TOKEN)
    found = client.feature_extraction("abc", normalize=True, truncate=True)
    assert found.shape == (1, 16) and found[0].tolist() == pytest.approx(server.post("/embed", inputs="abc").json()[0])


def test_the_openai_client_generates_streams_and_embeds(server: Server):
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="abc def", max_tokens=20, temperature=0)
    expected = server.post("/v1/completions", prompt="abc def", max_tokens=20).json()["choices"][0]
    assert whole.choices[0].text == expected["text"]
    assert whole.usage.completion_tokens == 20 and whole.choices[0].finish_reason == "length"
    pieces = list(client.completions.create(model="tiny", prompt="abc def", max_tokens=20, stream=True))
    assert len(pieces) > 1 and "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    vectors = client.embeddings.create(model="tiny", input=["abc", "d"]).data  # base64 on the wire
    floats = client.embeddings.create(model="tiny", input=["abc", "d"], encoding_format="float").data
    assert [vector.embedding for vector in vectors] == [vector.embedding for vector in floats]
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="gpt", prompt="abc")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_the_cohere_client_reranks(server: Server):
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    client = cohere.ClientV2(base_url=server.url, api_key=TOKEN)
    found = client.rerank(model="tiny", query="ab", documents=["abc", "hg", "d"], top_n=2)
    expected = server.post("/v2/rerank", query="ab", documents=["abc", "hg", "d"], top_n=2).json()["results"]
    assert [(one.index, one.relevance_score) for one in found.results] == [
        (one["index"], one["relevance_score"]) for one in expected
    ]


@pytest.mark.slow
def test_schemathesis_finds_no_failure_of_the_server(server: Server, tmp_path):
    pytest.importorskip("schemathesis", reason="pip install schemathesis")
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--header",
        f"Authorization: Bearer {TOKEN}", "--checks", "not_a_server_error,content_type_conformance", "--max-examples",
        "60", "--seed", "1", "--request-timeout", "60", "--workers", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    (tmp_path / "schemathesis.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    server.assert_well()


def test_the_openapi_document_describes_every_route(server: Server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1") and document["security"] == [{"token": []}]
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    for path in posts:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        answer = server.post(path)
        assert answer.status_code == 400 and json.dumps(schema["required"][0])[1:-1] in answer.text
    assert posts == {
        "/v1/completions", "/v1/embeddings", "/embed", "/v1/rerank", "/v2/rerank", "/rerank", "/answer", "/score",
    }  # fmt: skip

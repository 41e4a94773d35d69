"""The check of requests by their types, without a server."""

import pytest

from t5x._runtime.errors import UserError
from t5x.apps.serving import requests
from t5x.apps.serving.settings import ServerSettings

TYPES = requests.request_types(ServerSettings(max_length=64, max_documents=3))


def parse(body: str, route: str = "/v1/completions") -> dict:
    return requests.parse(body.encode(), TYPES[route])


@pytest.mark.parametrize("value", ["3", "3.0", "3e0"])
def test_an_integer_may_be_written_as_a_float(value):
    tokens = parse(f'{{"prompt": "x", "max_tokens": {value}}}')["max_tokens"]
    assert tokens == 3 and isinstance(tokens, int)


@pytest.mark.parametrize("value", ['"3"', "2.5", "true", "0", "65", "1e300", "[3]", "9" * 400])
def test_an_invalid_integer_is_refused_with_its_name(value):
    with pytest.raises(UserError, match=r"max_tokens|out of range"):
        parse(f'{{"prompt": "x", "max_tokens": {value}}}')


def test_null_means_the_default():
    fields = parse('{"prompt": "x", "truncate": null, "stop": null, "stream_options": {"include_usage": null}}')
    assert fields == {**parse('{"prompt": "x"}'), "stream_options": {"include_usage": None}}
    assert fields["truncate"] is False and fields["stop"] is None and fields["temperature"] is None
    assert parse('{"inputs": "x", "normalize": null}', "/embed")["normalize"] is True


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"prompt": null}', "prompt"), ('{"prompt": "x", "extra": null}', "extra"),
        ('{"prompt": ["x", 3]}', r"prompt\[1\]"), ('{"prompt": ["x", "x", "x", "x"]}', "<= 3"),
        ('{"prompt": "x", "stop": ["a", ""]}', r"stop\[1\]"), ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "x", "stream_options": {"usage": true}}', "usage"), ('["prompt"]', "object"),
    ],
)  # fmt: skip
def test_a_message_names_the_field_or_the_reason(body, reason):
    with pytest.raises(UserError, match=reason):
        parse(body)


def test_a_long_field_name_does_not_make_a_long_message():
    with pytest.raises(UserError) as raised:
        parse(f'{{"{"x" * 10_000}": 1}}')
    assert len(str(raised.value)) < 400


def test_documents_are_strings_or_objects_with_a_text():
    fields = parse('{"query": "a", "documents": ["b", {"text": "c"}]}', "/v2/rerank")
    assert fields["documents"] == ["b", {"text": "c"}] and fields["top_n"] is None
    with pytest.raises(UserError, match=r"documents\[0\]"):
        parse('{"query": "a", "documents": [{"title": "c"}]}', "/v2/rerank")


def test_the_openapi_document_has_the_limits_of_the_server():
    document = requests.openapi(TYPES, has_token=False)
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"type": "integer", "minimum": 1, "maximum": 64} in schema["properties"]["max_tokens"]["anyOf"]
    assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
    assert all("description" in field for field in schema["properties"].values())
    assert schema["properties"]["max_new_tokens"]["description"] == "Hugging Face's name of max_tokens"

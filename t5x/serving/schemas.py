"""JSON schemas of requests, used to validate them and in the OpenAPI document. `operations` computes the responses."""

import math
from collections.abc import Mapping
from typing import Any

from t5x import __version__
from t5x.decoding.constraints import PENALTIES
from t5x.errors import did_you_mean, shorten
from t5x.inference.loaded import MAX_LENGTH
from t5x.inference.options import HUGGINGFACE_NAMES
from t5x.serving.settings import Settings

Schema = dict[str, Any]
OPENAI_NAMES = {"max_tokens": "max_length", "n": "num_return"}  # of decoding options that have another name here


class InvalidRequest(Exception):
    """A request that does not fit its schema. The message has the place and the reason."""


def check(value: Any, schema: Schema, where: str = "the body") -> Any:
    """Return the value with the defaults of missing fields.

    Supports only the JSON Schema keywords that `request_schemas` uses.

    Raises:
      InvalidRequest: the value does not fit the schema.
    """
    if "anyOf" in schema:
        return _check_any(value, schema["anyOf"], where)
    kind = schema["type"]
    if not _TYPES[kind](value):
        raise InvalidRequest(f"{where} is {shorten(value, 60)}: it must be {_ARTICLES[kind]}.")
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(map(str, schema["enum"]))
        raise InvalidRequest(f"{where} is {shorten(value, 60)}: it must be one of {choices}.")
    if kind == "string":
        _check_string(value, schema, where)
    elif kind in ("integer", "number"):
        low, high = schema["minimum"], schema["maximum"]
        if not low <= value <= high:
            raise InvalidRequest(f"{where} is {shorten(value, 60)}: it must be {_range(low, high)}.")
        return int(value) if kind == "integer" else value
    elif kind == "array":
        low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if not low <= len(value) <= high:
            raise InvalidRequest(f"{where} has {len(value)} items: there must be {_range(low, high)}.")
        return [check(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
    elif kind == "object":
        return _check_object(value, schema, where)
    return value


def _check_any(value: Any, schemas: list[Schema], where: str) -> Any:
    fitting = [schema for schema in schemas if _TYPES[schema["type"]](value)]
    if not fitting:
        wanted = " or ".join(_ARTICLES[schema["type"]] for schema in schemas)
        raise InvalidRequest(f"{where} is {shorten(value, 60)}: it must be {wanted}.")
    return check(value, fitting[0], where)


def _check_string(value: str, schema: Schema, where: str) -> None:
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not low <= len(value) <= high:
        raise InvalidRequest(f"{where} has {len(value)} characters: there must be {_range(low, high)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{where} contains a surrogate, which is not a character.") from None


def _check_object(value: Mapping[str, Any], schema: Schema, where: str) -> dict[str, Any]:
    known = schema["properties"]
    for name in value:
        if name not in known:
            hint = did_you_mean(name, list(known)) or " /openapi.json lists the fields."
            raise InvalidRequest(f"{where} has the unknown field {shorten(name, 60)}.{hint}")
    inside = "" if where == "the body" else f"{where}."
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        raise InvalidRequest(f"{inside}{missing[0]} is missing.")
    made = {}
    for name, of_field in known.items():
        if value.get(name) is not None or name in schema.get("required", ()):
            made[name] = check(value[name], of_field, f"{inside}{name}")
        else:
            made[name] = of_field.get("default")
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


_TYPES = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_ARTICLES = {
    "string": "a string", "number": "a number", "integer": "an integer", "boolean": "true or false",
    "array": "a list", "object": "an object",
}  # fmt: skip


def _range(low: float, high: float) -> str:
    return f"at least {low}" if high == math.inf else f"{low} to {high}"


# --- Requests ---------------------------------------------------------------------------------------------------------


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _number(kind: str, description: str, low: float, high: float, **more: Any) -> Schema:
    return {"type": kind, "description": description, "minimum": low, "maximum": high, **more}


def _flag(description: str, default: bool | None = False) -> Schema:
    made = {"type": "boolean", "description": description}
    return made if default is None else made | {"default": default}


def request_schemas(settings: Settings) -> dict[str, Schema]:
    """Return {route: schema of its request}."""
    max_documents, max_length = settings.max_documents, settings.max_length
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": max_documents}
    model = _text("name of a model of this server; the first is the default")
    one_or_more = {"anyOf": [{"type": "string"}, texts]}
    truncate = _flag("truncate longer inputs instead of refusing them")
    user = _text("ignored")
    query = _text("the query", minLength=1)
    top_n = _number("integer", "return only the best N", 1, 2**31 - 1)
    documents = {
        "type": "array", "minItems": 1, "maxItems": max_documents, "description": "the passages",
        "items": {"anyOf": [{"type": "string"}, _object(("text",), text={"type": "string"})]},
    }  # fmt: skip
    unsupported = "not supported: only "
    usage = _object((), include_usage=_flag("end a stream with its numbers of tokens"))
    return {
        "/v1/completions": _object(
            ("prompt",), model=model, prompt=one_or_more | {"description": "input of the encoder, or several"},
            **_decoding_fields(settings),
            seed=_number("integer", "seed of samples; random by default", 0, 2**31 - 1),
            frequency_penalty=_number("number", unsupported + "0", 0, 0),
            presence_penalty=_number("number", unsupported + "0", 0, 0),
            best_of=_number("integer", unsupported + "1", 1, 1),
            echo={"type": "boolean", "description": unsupported + "false", "enum": [False]},
            stream=_flag("send the output in pieces, as server-sent events"),
            stream_options={**usage, "default": {"include_usage": False}}, truncate=truncate, user=user,
        ),
        "/v1/embeddings": _object(
            ("input",), model=model, input=one_or_more, truncate=truncate, user=user,
            encoding_format={"type": "string", "enum": ["float", "base64"], "default": "float"},
        ),
        "/embed": _object(
            ("inputs",), inputs=one_or_more, truncate=truncate,
            normalize=_flag("return vectors of length 1; must be true", default=True),
        ),
        "/v1/rerank": _object(
            ("query", "documents"), model=model, query=query, documents=documents, top_n=top_n,
            return_documents=_flag("include the passages in the response"),
        ),
        "/v2/rerank": _object(
            ("query", "documents"), model=model, query=query, documents=documents, top_n=top_n,
            max_tokens_per_doc=_number("integer", "ignored: the template decides", 1, 2**31 - 1),
            priority=_number("integer", "ignored", 0, 999),
        ),
        "/rerank": _object(
            ("query", "texts"), query=query, texts=texts, raw_scores=_flag("return logits instead of probabilities"),
            return_text=_flag("include the texts in the response"),
            truncate=_flag("ignored: long texts are truncated", default=True),
        ),
        "/answer": _object(
            ("question", "context"), model=model, question=_text("the question", minLength=1),
            context=_text("the text that contains the answer", minLength=1, maxLength=200_000),
            no_answer=_text("what the model was trained to generate if there is no answer", minLength=1, maxLength=200),
            beams=_number("integer", "beam size; 1 is greedy", 1, settings.max_beams, default=1),
            max_tokens=_number("integer", "maximum generated tokens", 1, max_length, default=min(64, max_length)),
        ),
        "/score": _object(("input", "target"), model=model, input=one_or_more, target=one_or_more, truncate=truncate),
    }  # fmt: skip


def default_length(max_length: int) -> int:
    """Return the maximum number of generated tokens of a request that does not set it."""
    return min(MAX_LENGTH, max_length)


def _decoding_fields(settings: Settings) -> dict[str, Schema]:
    """Return the fields that `operations.wanted` translates. They have no defaults, to tell which were sent."""
    max_length, max_beams = settings.max_length, settings.max_beams
    strings = {"type": "array", "items": {"type": "string", "minLength": 1}}
    most = f"maximum generated tokens; default: {default_length(max_length)}"
    fields = {
        "max_tokens": _number("integer", most, 1, max_length),
        "n": _number("integer", "number of outputs per prompt, best first", 1, max_beams),
        "temperature": _number("number", "sample with this temperature; 0, the default, is greedy", 0, 100),
        "top_p": _number("number", "sample from tokens of this total probability", 0, 1),
        "top_k": _number("integer", "sample from the k most probable tokens; 0 is all", 0, 2**31 - 1),
        "beams": _number("integer", "beam size; 1 is greedy", 1, max_beams),
        "length_penalty": _number(
            "number", "divide beam scores by length ** x, as Hugging Face does; default: T5X's", -10, 10
        ),
        "min_length": _number("integer", "minimum generated tokens, without EOS", 0, max_length - 1),
        "no_repeat_ngram": _number("integer", "never repeat this many consecutive tokens; 0 is off", 0, max_length),
        "repetition_penalty": _number("number", "above 1: fewer repeated tokens", *PENALTIES),
        "choices": {**strings, "maxItems": settings.max_documents, "description": "the only possible outputs"},
        "stop": {
            "anyOf": [{"type": "string", "minLength": 1}, {**strings, "maxItems": 16}],
            "description": "end outputs before these strings",
        },
    }
    openai = {ours: name for name, ours in OPENAI_NAMES.items()}
    for name, ours in HUGGINGFACE_NAMES.items():
        same = openai.get(ours, ours)
        fields[name] = {**fields[same], "description": f"Hugging Face's name of {same}"}
    fields["num_beams"]["description"] += "; its search, with a length_penalty of 1 by default"
    fields["do_sample"] = _flag("Hugging Face: sample, with temperature 1 and top_k 50 by default", default=None)
    fields["early_stopping"] = _flag("Hugging Face: only false is supported", default=None)
    return fields


DECODING_FIELDS = tuple(_decoding_fields(Settings()))
_TITLES = {
    "/v1/completions": "Generate outputs (OpenAI)",
    "/v1/embeddings": "Embed inputs: the normalized mean of the encoder's outputs (OpenAI)",
    "/embed": "Embed inputs (Text Embeddings Inference)",
    "/v1/rerank": "Order passages by relevance (Jina)",
    "/v2/rerank": "Order passages by relevance (Cohere)",
    "/rerank": "Order texts by relevance (Text Embeddings Inference)",
    "/answer": "Answer a question about a text and locate the answer in it",
    "/score": "Log probabilities of targets given inputs",
}
_ERRORS = {
    "400": "The request is invalid.", "401": "The bearer token is missing or wrong.",
    "404": "The model does not exist.", "408": "The body did not arrive in time.", "413": "The body is too large.",
    "415": "The body is not application/json.", "429": "Too many requests; retry after the seconds in Retry-After.",
    "503": "The models are not loaded yet, or the time limit was reached.",
}  # fmt: skip


def openapi(requests: Mapping[str, Schema], *, has_token: bool) -> dict[str, Any]:
    """Return the OpenAPI document of the server."""
    fields = _object(("message", "type"), message={"type": "string"}, type={"type": "string"})
    error = _object(("error",), error=fields)

    def content(schema: Schema) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}

    errors = {
        code: {"description": text, "content": content({"$ref": "#/components/schemas/Error"})}
        for code, text in _ERRORS.items()
    }
    paths: dict[str, Any] = {}
    for path, schema in requests.items():
        shape = {"type": "array"} if path in ("/rerank", "/embed") else {"type": "object"}
        made = content(shape)
        if path == "/v1/completions":
            made["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": _TITLES[path],
                "requestBody": {"required": True, "content": content(schema)},
                "responses": {"200": {"description": "The result.", "content": made}, **errors},
            }
        }
    text = {"text/plain": {"schema": {"type": "string"}}}
    for path, title, made, open_to_all, refused in (
        ("/v1/models", "List the models (OpenAI)", content({"type": "object"}), False, "401"),
        ("/health", "Whether the process runs", content({"type": "object"}), True, "503"),
        ("/ready", "Whether the models are loaded", content({"type": "object"}), True, "503"),
        ("/metrics", "Metrics for Prometheus", text, False, "401"),
    ):
        responses = {"200": {"description": "The result.", "content": made}, refused: errors[refused]}
        paths[path] = {"get": {"summary": title, "responses": responses, **({"security": []} if open_to_all else {})}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "t5x serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": error}},
    }
    if has_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document

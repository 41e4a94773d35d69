"""Requests of the server: structs that check them, and the OpenAPI document. `operations` computes the responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from t5x._runtime import __version__
from t5x._runtime.errors import UserError
from t5x.apps.serving.settings import ServerSettings
from t5x.decoding.constraints import PENALTIES
from t5x.inference.generation import HUGGINGFACE_NAMES
from t5x.inference.loaded import MAX_LENGTH

OPENAI_NAMES = {"max_tokens": "max_length", "n": "num_return"}  # of decoding options that have another name here
_MAX_INTEGER = 2**31 - 1
_MAX_MESSAGE = 300


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, Meta(description="end a stream with its numbers of tokens")] = False


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class ErrorDetails(msgspec.Struct):
    message: str
    type: str


class Error(msgspec.Struct):
    error: ErrorDetails


def parse(body: bytes, request_type: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of a request, with the defaults of missing ones. A field that is null is missing.

    Raises:
      UserError: the body is not JSON, or does not fit the type. The message has the field and the reason.
    """
    try:
        content = msgspec.json.decode(body)
        if isinstance(content, dict):
            # For msgspec, 3.0 is no integer. In JSON Schema, and for clients in JavaScript, it is.
            content = {
                name: int(value) if isinstance(value, float) and value.is_integer() else value
                for name, value in content.items() if value is not None or name not in request_type.__struct_fields__
            }  # fmt: skip
        return msgspec.to_builtins(msgspec.convert(content, request_type))
    except msgspec.ValidationError as error:
        reason = str(error).replace("`$.", "`")[:_MAX_MESSAGE]
        raise UserError(f"The request is invalid: {reason}. /openapi.json describes the fields.") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        hint = " A string may contain half a surrogate pair." if b"\\ud" in body.lower() else ""
        raise UserError(f"The body is not valid JSON: {error}.{hint}") from error


# --- Types ------------------------------------------------------------------------------------------------------------


def _limited(kind: Any, low: float, high: float) -> Any:
    """Return the type of numbers from `low` to `high`."""
    return Annotated[kind, Meta(ge=low, le=high)]


def _optional(kind: Any, description: str, default: Any = None) -> tuple[Any, Any]:
    """Return the type and default of an optional field."""
    return Annotated[kind | None, Meta(description=description)], default


def _request(name: str, required: Mapping[str, Any], **optional: tuple[Any, Any]) -> type[msgspec.Struct]:
    fields: list[Any] = [*required.items(), *((field, kind, default) for field, (kind, default) in optional.items())]
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def request_types(settings: ServerSettings) -> dict[str, type[msgspec.Struct]]:
    """Return {route: type of its request}, with the limits of a server."""
    max_documents, max_length = settings.max_documents, settings.max_length
    texts = Annotated[list[str], Meta(min_length=1, max_length=max_documents)]
    one_or_more = str | texts
    prompt = Annotated[one_or_more, Meta(description="input of the encoder, or several")]
    query = Annotated[str, Meta(min_length=1, description="the query")]
    question = Annotated[str, Meta(min_length=1, description="the question")]
    context = Annotated[str, Meta(min_length=1, max_length=200_000, description="the text that contains the answer")]
    documents = Annotated[
        list[str | Document], Meta(min_length=1, max_length=max_documents, description="the passages")
    ]
    model = _optional(str, "name of a model of this server; the first is the default")
    truncate = _optional(bool, "truncate longer inputs instead of refusing them", False)
    user = _optional(str, "ignored")
    top_n = _optional(_limited(int, 1, _MAX_INTEGER), "return only the best N")
    zero = _optional(_limited(float, 0, 0), "not supported: only 0")
    return {
        "/v1/completions": _request(
            "Completions", {"prompt": prompt}, model=model, **_decoding_fields(settings),
            seed=_optional(_limited(int, 0, _MAX_INTEGER), "seed of samples; random by default"),
            frequency_penalty=zero, presence_penalty=zero,
            best_of=_optional(_limited(int, 1, 1), "not supported: only 1"),
            echo=_optional(bool, "not supported: only false"),
            stream=_optional(bool, "send the output in pieces, as server-sent events", False),
            stream_options=_optional(StreamOptions, "of `stream`", StreamOptions()), truncate=truncate, user=user,
        ),
        "/v1/embeddings": _request(
            "Embeddings", {"input": one_or_more}, model=model, truncate=truncate, user=user,
            encoding_format=_optional(Literal["float", "base64"], "how each embedding is sent", "float"),
        ),
        "/embed": _request(
            "TeiEmbeddings", {"inputs": one_or_more}, truncate=truncate,
            normalize=_optional(bool, "return vectors of length 1; must be true", True),
        ),
        "/v1/rerank": _request(
            "JinaRerank", {"query": query, "documents": documents}, model=model, top_n=top_n,
            return_documents=_optional(bool, "include the passages in the response", False),
        ),
        "/v2/rerank": _request(
            "CohereRerank", {"query": query, "documents": documents}, model=model, top_n=top_n,
            max_tokens_per_doc=_optional(_limited(int, 1, _MAX_INTEGER), "ignored: the template decides"),
            priority=_optional(_limited(int, 0, 999), "ignored"),
        ),
        "/rerank": _request(
            "TeiRerank", {"query": query, "texts": texts},
            raw_scores=_optional(bool, "return logits instead of probabilities", False),
            return_text=_optional(bool, "include the texts in the response", False),
            truncate=_optional(bool, "ignored: long texts are truncated", True),
        ),
        "/answer": _request(
            "Answer", {"question": question, "context": context}, model=model,
            no_answer=_optional(
                Annotated[str, Meta(min_length=1, max_length=200)],
                "what the model was trained to generate if there is no answer",
            ),
            beams=_optional(_limited(int, 1, settings.max_beams), "beam size; 1 is greedy", 1),
            max_tokens=_optional(_limited(int, 1, max_length), "maximum generated tokens", min(64, max_length)),
        ),
        "/score": _request("Score", {"input": one_or_more, "target": one_or_more}, model=model, truncate=truncate),
    }  # fmt: skip


def default_length(max_length: int) -> int:
    """Return the maximum number of generated tokens of a request that does not set it."""
    return min(MAX_LENGTH, max_length)


def _decoding_fields(settings: ServerSettings) -> dict[str, tuple[Any, Any]]:
    """Return the fields for `operations.parse_generation_options`, without defaults, to tell which were sent."""
    max_length, max_beams = settings.max_length, settings.max_beams
    string = Annotated[str, Meta(min_length=1)]
    length = f"maximum generated tokens; default: {default_length(max_length)}"
    penalty = "divide beam scores by length ** x, as Hugging Face does; default: T5X's"
    fields: dict[str, tuple[Any, str]] = {
        "max_tokens": (_limited(int, 1, max_length), length),
        "n": (_limited(int, 1, max_beams), "number of outputs per prompt, best first"),
        "temperature": (_limited(float, 0, 100), "sample with this temperature; 0, the default, is greedy"),
        "top_p": (_limited(float, 0, 1), "sample from tokens of this total probability"),
        "top_k": (_limited(int, 0, _MAX_INTEGER), "sample from the k most probable tokens; 0 is all"),
        "beams": (_limited(int, 1, max_beams), "beam size; 1 is greedy"),
        "length_penalty": (_limited(float, -10, 10), penalty),
        "min_length": (_limited(int, 0, max_length - 1), "minimum generated tokens, without EOS"),
        "no_repeat_ngram": (_limited(int, 0, max_length), "never repeat this many consecutive tokens; 0 is off"),
        "repetition_penalty": (_limited(float, *PENALTIES), "above 1: fewer repeated tokens"),
        "choices": (Annotated[list[string], Meta(max_length=settings.max_documents)], "the only possible outputs"),
        "stop": (string | Annotated[list[string], Meta(max_length=16)], "end outputs before these strings"),
    }
    openai_names = {option: name for name, option in OPENAI_NAMES.items()}
    for name, option in HUGGINGFACE_NAMES.items():
        same = openai_names.get(option, option)
        search = "; its search, with a length_penalty of 1 by default" if name == "num_beams" else ""
        fields[name] = fields[same][0], f"Hugging Face's name of {same}{search}"
    fields["do_sample"] = bool, "Hugging Face: sample, with temperature 1 and top_k 50 by default"
    fields["early_stopping"] = bool, "Hugging Face: only false is supported"
    return {name: _optional(*field) for name, field in fields.items()}


DECODING_FIELDS = tuple(_decoding_fields(ServerSettings()))
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


def openapi(types: Mapping[str, type[msgspec.Struct]], *, has_token: bool) -> dict[str, Any]:
    """Return the OpenAPI document of the server."""
    (*_, error), schemas = msgspec.json.schema_components(
        [*types.values(), Error], ref_template="#/components/schemas/{name}"
    )

    def content(schema: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}

    errors = {code: {"description": text, "content": content(error)} for code, text in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, request_type in types.items():
        result = content({"type": "array" if path in ("/rerank", "/embed") else "object"})
        if path == "/v1/completions":
            result["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": _TITLES[path],
                "requestBody": {"required": True, "content": content(schemas.pop(request_type.__name__))},
                "responses": {"200": {"description": "The result.", "content": result}, **errors},
            }
        }
    text = {"text/plain": {"schema": {"type": "string"}}}
    for path, title, result, is_public, refused in (
        ("/v1/models", "List the models (OpenAI)", content({"type": "object"}), False, "401"),
        ("/health", "Whether the process runs", content({"type": "object"}), True, "503"),
        ("/ready", "Whether the models are loaded", content({"type": "object"}), True, "503"),
        ("/metrics", "Metrics for Prometheus", text, False, "401"),
    ):
        responses = {"200": {"description": "The result.", "content": result}, refused: errors[refused]}
        paths[path] = {"get": {"summary": title, "responses": responses, **({"security": []} if is_public else {})}}
    components: dict[str, Any] = {"schemas": schemas}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "t5x serve", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if has_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document

"""Functions that compute the response of each route from its checked fields. They block."""

import base64
import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError
from t5x.apps.answering import answers
from t5x.apps.serving.batched_model import BatchedModel
from t5x.apps.serving.requests import DECODING_FIELDS, OPENAI_NAMES
from t5x.inference import generation
from t5x.inference.generation import Decoding, Generation, translate_arguments
from t5x.inference.loaded import Ids

_STRIDE = 128
Fields = dict[str, Any]


class Result(NamedTuple):
    """A response, or a piece of one.

    Attributes:
      content: JSON, or events.
      input_tokens, output_tokens: their numbers.
    """

    content: bytes
    input_tokens: int = 0
    output_tokens: int = 0


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _input_ids(model: BatchedModel, texts: Sequence[str], truncate: bool) -> list[list[int]]:
    """Return the ids of inputs. Raises a UserError for longer ones, unless they are truncated."""
    limit, encoded = model.max_input_length, []
    for i, text in enumerate(texts):
        ids, length = model.input_ids(text, limit)
        if length > limit and not truncate:
            raise UserError(f"Input {i} has {length} tokens, more than {limit}. Shorten it, or send truncate: true.")
        encoded.append(ids)
    return encoded


def _count(inputs: Sequence[Ids]) -> int:
    return sum(map(len, inputs))


def _number(value: float) -> float | None:
    """Return a number for JSON, which has no infinities and no NaN."""
    return float(value) if math.isfinite(value) else None


# --- Generation -------------------------------------------------------------------------------------------------------


class GenerationOptions(NamedTuple):
    """Decoding options, length limit and stop strings of a request."""

    decoding: Decoding
    max_length: int
    stop: list[str]


def parse_generation_options(fields: Fields) -> GenerationOptions:
    """Return the decoding options of a request, which have OpenAI's, Hugging Face's and our names.

    As OpenAI's clients send neutral values, a temperature of 0 is greedy decoding, and a top_p of 1 is none.
    """
    if fields["echo"]:
        raise UserError("echo is true: only false is supported.")
    sent = {OPENAI_NAMES.get(name, name): fields[name] for name in DECODING_FIELDS if fields[name] is not None}
    options = translate_arguments(sent, own=("max_length", "stop"))
    is_greedy = options.get("temperature") == 0
    for name, neutral in (("temperature", 0), ("top_k", 0), ("top_p", 1)):
        if is_greedy or options.get(name) == neutral:
            options.pop(name, None)
    max_length, stop = options.pop("max_length", fields["default_length"]), options.pop("stop", [])
    return GenerationOptions(Decoding(**options), max_length, _as_list(stop))


def complete(name: str, model: BatchedModel, fields: Fields) -> Result:
    """Answer OpenAI's completions request. Each choice also has a `score`: its log probability, or beam score."""
    inputs = _input_ids(model, _as_list(fields["prompt"]), fields["truncate"])
    options = parse_generation_options(fields)
    keys = _sampling_keys(fields, len(inputs))
    predictions = model.predictions(inputs, options.decoding, max_length=options.max_length, **keys)
    outputs = [output for of_input in predictions for output in of_input]
    choices = [_choice(model, i, output, options.stop) for i, output in enumerate(outputs)]
    used, generated = _count(inputs), sum(len(output.tokens) for output in outputs)
    content = {**_head(name), "choices": choices, "usage": _usage(used, generated)}
    return Result(_json(content), used, generated)


def stream(name: str, model: BatchedModel, fields: Fields) -> Iterator[Result]:
    """Yield OpenAI's completions as server-sent events: a single output in pieces, several when they are finished."""
    head = _head(name)

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + _json({**head, "choices": choices, **more}) + b"\n\n"

    inputs = _input_ids(model, _as_list(fields["prompt"]), fields["truncate"])
    (decoding, max_length, stop), keys = parse_generation_options(fields), _sampling_keys(fields, len(inputs))
    outputs: list[Generation] = []
    if len(inputs) > 1 or decoding.beams > 1 or decoding.num_return > 1:
        predictions = model.predictions(inputs, decoding, max_length=max_length, **keys)
        outputs = [output for of_input in predictions for output in of_input]
        for i, output in enumerate(outputs):
            yield Result(event([_choice(model, i, output, stop)]))
    else:

        def generate(limit: int) -> Generation:
            ((output, *_),) = model.predictions(inputs, decoding, max_length=limit, room=max_length, **keys)
            return output

        for piece in generation.stream(generate, max_length, model.model.eos_ids, stop):
            choice = {"index": 0, "finish_reason": None, "logprobs": None, "score": None}
            if piece.generation is not None:
                outputs = [piece.generation]
                choice = _choice(model, 0, piece.generation, stop)
            yield Result(event([choice | {"text": piece.text}]))
    used, generated = _count(inputs), sum(len(output.tokens) for output in outputs)
    usage = event([], usage=_usage(used, generated)) if fields["stream_options"]["include_usage"] else b""
    yield Result(usage + b"data: [DONE]\n\n", used, generated)


def _usage(used: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": used, "completion_tokens": generated, "total_tokens": used + generated}


def _sampling_keys(fields: Fields, count: int) -> dict[str, Any]:
    """Return the seed and indices that key random numbers. Without a seed, the indices are random."""
    if fields["seed"] is not None:
        return {"seed": fields["seed"], "indices": range(count)}
    return {"seed": 0, "indices": [secrets.randbits(31) for _ in range(count)]}


def _head(name: str) -> dict[str, Any]:
    ident = f"cmpl-{secrets.token_hex(12)}"
    return {"id": ident, "object": "text_completion", "created": int(time.time()), "model": name}


def _choice(model: BatchedModel, index: int, output: Generation, stop: Sequence[str]) -> dict[str, Any]:
    text, is_stopped = generation.cut_at_stop(output.text, stop)
    reason = "stop" if is_stopped or output.has_eos(model.model.eos_ids) else "length"
    score = None if is_stopped else _number(output.score)
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None, "score": score}


# --- Embeddings -------------------------------------------------------------------------------------------------------


def embed_openai(name: str, model: BatchedModel, fields: Fields) -> Result:
    inputs = _input_ids(model, _as_list(fields["input"]), fields["truncate"])
    embeddings = model.embeddings(inputs)
    if fields["encoding_format"] == "base64":
        vectors = [base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() for vector in embeddings]
    else:
        vectors = [vector.tolist() for vector in embeddings]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": _count(inputs), "total_tokens": _count(inputs)}
    return Result(_json({"object": "list", "data": data, "model": name, "usage": usage}), _count(inputs))


def embed_tei(name: str, model: BatchedModel, fields: Fields) -> Result:
    if not fields["normalize"]:
        raise UserError("normalize is false: embeddings of this server always have length 1.")
    inputs = _input_ids(model, _as_list(fields["inputs"]), fields["truncate"])
    return Result(_json([vector.tolist() for vector in model.embeddings(inputs)]), _count(inputs))


# --- Ranking ----------------------------------------------------------------------------------------------------------


class _Ranking(NamedTuple):
    """The positions of passages, best first; the logit and probability of each passage; and the tokens of all."""

    order: list[int]
    logits: list[float]
    probabilities: list[float]
    tokens: int


def _rank(model: BatchedModel, query: str, passages: Sequence[str]) -> _Ranking:
    encoded = model.reranker.encode([(query, passage) for passage in passages])
    logits = model.reranker.logits(encoded)
    if not np.isfinite(logits).all():
        raise UserError("The logits of this model are not finite: its weights may be damaged.")
    raw = logits[:, 0].astype(np.float64) - (logits[:, 1] if logits.shape[1] > 1 else 0)
    probabilities = np.exp(-np.logaddexp(0, -raw))
    order = sorted(range(len(passages)), key=lambda i: -raw[i])
    return _Ranking(order, raw.tolist(), probabilities.tolist(), _count(encoded.inputs))


def _passages(fields: Fields) -> list[str]:
    return [each if isinstance(each, str) else each["text"] for each in fields["documents"]]


def rerank_jina(name: str, model: BatchedModel, fields: Fields) -> Result:
    passages = _passages(fields)
    ranking = _rank(model, fields["query"], passages)
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": ranking.probabilities[i]}
        | ({"document": {"text": passages[i]}} if fields["return_documents"] else {})
        for i in ranking.order[: fields["top_n"]]
    ]
    usage = {"prompt_tokens": ranking.tokens, "total_tokens": ranking.tokens}
    return Result(_json({"model": name, "object": "list", "usage": usage, "results": results}), ranking.tokens)


def rerank_cohere(name: str, model: BatchedModel, fields: Fields) -> Result:
    ranking = _rank(model, fields["query"], _passages(fields))
    results = [{"index": i, "relevance_score": ranking.probabilities[i]} for i in ranking.order[: fields["top_n"]]]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return Result(_json({"id": secrets.token_hex(16), "results": results, "meta": meta}), ranking.tokens)


def rerank_tei(name: str, model: BatchedModel, fields: Fields) -> Result:
    ranking = _rank(model, fields["query"], fields["texts"])
    values = ranking.logits if fields["raw_scores"] else ranking.probabilities
    results = [{"index": i, "score": values[i]} for i in ranking.order]
    if fields["return_text"]:
        results = [{**result, "text": fields["texts"][result["index"]]} for result in results]
    return Result(_json(results), ranking.tokens)


# --- Answers and scores -----------------------------------------------------------------------------------------------


def answer(name: str, model: BatchedModel, fields: Fields) -> Result:
    options = answers.AnswerOptions(
        no_answer=fields["no_answer"], beams=fields["beams"], max_length=fields["max_tokens"],
        max_input_length=model.max_input_length, stride=min(_STRIDE, model.max_input_length // 4),
    )  # fmt: skip
    pair = (fields["question"], fields["context"])
    windows = answers.windows_of(model, *pair, options)
    if len(windows) > fields["max_windows"]:
        raise UserError(f"The context needs {len(windows)} windows, more than {fields['max_windows']}. Shorten it.")
    (result,) = answers.answer(model, [pair], [windows], options)
    record = {"model": name, **result.as_record(), "score": _number(result.score)}
    used = sum(model.input_ids(fields["context"][span.start : span.end])[1] for span in windows)
    generated = len(model.target_ids(result.text)[0])
    return Result(_json({**record, "usage": _usage(used, generated)}), used, generated)


def score(name: str, model: BatchedModel, fields: Fields) -> Result:
    inputs, targets = _as_list(fields["input"]), _as_list(fields["target"])
    if len(inputs) == 1:
        inputs = inputs * len(targets)
    if len(inputs) != len(targets):
        raise UserError(f"{len(inputs)} inputs but {len(targets)} targets: send one target for each input.")
    input_ids = _input_ids(model, inputs, fields["truncate"])
    target_ids = [model.target_ids(target)[0] for target in targets]
    limit = model.max_input_length
    if not fields["truncate"] and (long := next((ids for ids in target_ids if len(ids) > limit), None)):
        raise UserError(f"A target has {len(long)} tokens, more than {limit}. Shorten it, or send truncate: true.")
    target_ids = [ids[:limit] for ids in target_ids]
    scores = model.scores(input_ids, target_ids)
    data = [
        {"index": i, "score": _number(value), "tokens": len(ids)}
        for i, (value, ids) in enumerate(zip(scores, target_ids, strict=True))
    ]
    used = _count(input_ids)
    usage = {"prompt_tokens": used, "total_tokens": used + _count(target_ids)}
    return Result(_json({"model": name, "data": data, "usage": usage}), used)

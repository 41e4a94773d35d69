"""Directories of other libraries: Hugging Face, CTranslate2 (by its own converter) and ONNX (by Optimum)."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.apps.exporting.checking import INT8_ACTIVATIONS_LIMIT, ExportComparison, Sample, padded, report_loss, scores_of
from t5x.checkpoints.convert import convert
from t5x.inference.generation import Decoding
from t5x.inference.loaded import LoadedModel, load, without_padding
from t5x.models import EncoderDecoderModel

Greedy = Callable[[list[list[int]], int], list[list[int]]]  # (inputs, maximum length) -> outputs


def write_huggingface(directory: str, model: str, vocabulary: str | None, sample: Sample, max_length: int) -> str:
    """Write a Hugging Face directory, run it with transformers where that is installed, and return the differences."""
    with _converted(directory, model, vocabulary) as (source, original):
        _move_files(source, directory)
    try:
        import torch
        import transformers
    except ImportError:
        copy = load(directory, dtype="float32")
        return _compare(original, lambda inputs, limit: _greedy(copy, inputs, limit), sample, max_length)
    network = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    network.config.tie_word_embeddings = original.model.module.config.logits_via_embedding  # which umT5 needs
    return _compare_huggingface(original, network, sample, max_length)


def write_onnx(directory: str, model: str, vocabulary: str | None, sample: Sample, max_length: int) -> str:
    """Write an ONNX directory with Optimum, run it with ONNX Runtime, and return the differences."""
    fix = "ONNX exports are made by Optimum: pip install optimum-onnx onnxruntime"
    optimum = import_extra("optimum.onnxruntime", fix)
    main_export = import_extra("optimum.exporters.onnx", fix).main_export
    with _converted(directory, model, vocabulary) as (source, original):
        main_export(source, directory, task="text2text-generation-with-past", do_validation=False)
    network = optimum.ORTModelForSeq2SeqLM.from_pretrained(directory)
    return _compare_huggingface(original, network, sample, max_length)


def write_ctranslate2(
    directory: str, model: str, vocabulary: str | None, sample: Sample, max_length: int, *, int8: bool
) -> str:
    """Write a CTranslate2 directory with its converter, run it, and return the differences."""
    fix = "CTranslate2 exports are made by its converter: pip install ctranslate2 transformers torch"
    ctranslate2 = import_extra("ctranslate2", fix)
    for module in ("torch", "transformers"):
        import_extra(module, fix)
    with _converted(directory, model, vocabulary) as (source, original):
        output = os.path.join(os.path.dirname(source), "ct2")
        converter = _converter(ctranslate2, source, tied=original.model.module.config.logits_via_embedding)
        converter.convert(output, quantization="int8" if int8 else None)
        _move_files(output, directory)
    translator = ctranslate2.Translator(directory, device="cpu", compute_type="int8" if int8 else "float32")
    with open(os.path.join(directory, "shared_vocabulary.json")) as file:
        pieces = json.load(file)
    ids = {piece: i for i, piece in enumerate(pieces)}

    def tokens(rows: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[pieces[i] for i in row] for row in rows]

    def greedy(inputs: list[list[int]], limit: int) -> list[list[int]]:
        results = translator.translate_batch(
            tokens(inputs), beam_size=1, max_decoding_length=limit, max_input_length=0, return_end_token=True
        )
        return [[ids[token] for token in result.hypotheses[0]] for result in results]

    def score(inputs: list[list[int]], targets: list[list[int]]) -> list[float]:
        scored = translator.score_batch(tokens(inputs), [row[:-1] for row in tokens(targets)])  # it appends EOS itself
        return [sum(each.log_probs) for each in scored]

    if not int8:
        return _compare(original, greedy, sample, max_length, score)
    inputs, targets = sample.encoded(original)
    after = -sum(score(inputs, targets)) / sum(map(len, targets))
    return report_loss(sample.loss(original), after, len(sample.texts), INT8_ACTIVATIONS_LIMIT)


def _converter(ctranslate2: Any, source: str, *, tied: bool) -> Any:
    """Return CTranslate2's converter with the model's own `tie_word_embeddings`, by which it scales the logits.

    transformers 5 sets it to true for every T5.
    """

    class Converter(ctranslate2.converters.TransformersConverter):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            network = super().load_model(*args, **kwargs)
            network.config.tie_word_embeddings = tied
            return network

    return Converter(source)


@contextlib.contextmanager
def _converted(directory: str, model: str, vocabulary: str | None) -> Iterator[tuple[str, LoadedModel]]:
    """Yield a temporary Hugging Face directory of the model inside `directory`, and the original."""
    original = load(model, vocabulary=vocabulary, dtype="float32")
    if not isinstance(original.model, EncoderDecoderModel):
        raise UserError("This model is decoder-only: transformers, CTranslate2 and Optimum have no class for it.")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        path = os.path.join(temporary, "hf")
        convert(original.source, path, to="hf")
        yield path, original


def _move_files(source: str, destination: str) -> None:
    for name in os.listdir(source):
        os.rename(os.path.join(source, name), os.path.join(destination, name))


def _greedy(loaded: LoadedModel, inputs: list[list[int]], limit: int) -> list[list[int]]:
    longest = max(map(len, inputs))
    outputs = loaded.predictions(inputs, Decoding(), max_length=limit, max_input_length=longest, batch_size=len(inputs))
    return [best.tokens for best, *_ in outputs]


def _compare_huggingface(original: LoadedModel, network: Any, sample: Sample, max_length: int) -> str:
    import torch

    model = original.model
    assert isinstance(model, EncoderDecoderModel)  # see `_converted`
    tokens = {"decoder_start_token_id": model.start_id, "pad_token_id": model.pad_id, "eos_token_id": [*model.eos_ids]}

    def greedy(inputs: list[list[int]], limit: int) -> list[list[int]]:
        ids = torch.from_numpy(padded(inputs, max(map(len, inputs)), model.pad_id)).long()
        mask = torch.from_numpy(padded([[1] * len(row) for row in inputs], ids.shape[1])).long()
        outputs = network.generate(
            ids, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=limit, **tokens
        )  # fmt: skip
        return [without_padding(row, model.pad_id) for row in outputs[:, 1:].numpy()]  # without the start token

    @torch.no_grad()
    def score_one(inputs: list[int], target: list[int]) -> float:
        ids, labels = torch.tensor([inputs]), torch.tensor([target])
        shifted = torch.tensor([[model.start_id, *target[:-1]]])
        logits = network(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=shifted).logits
        return torch.log_softmax(logits, -1).gather(-1, labels[:, :, None]).sum().item()

    return _compare(original, greedy, sample, max_length, lambda *pairs: [*map(score_one, *pairs)])


def _compare(
    original: LoadedModel, greedy: Greedy, sample: Sample, max_length: int, score: Callable[..., Any] | None = None
) -> str:
    comparison = ExportComparison("float32")
    inputs = [original.input_ids(text)[0] for text in sample.texts]
    expected = _greedy(original, inputs, max_length)
    comparison.outputs("greedy", expected, greedy(inputs, max_length))
    if score is not None:
        targets = [original.target_ids(original.decode(ids))[0] for ids in expected]
        comparison.numbers("score", scores_of(original, inputs, targets), score(inputs, targets))
    return str(comparison)

"""TensorFlow SavedModels: strings in, strings and scores out, or token ids. TensorFlow alone runs them."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.export import is_symbolic_dim

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.apps.exporting import checking
from t5x.apps.exporting.programs import DEFAULT_PLATFORMS, Exportable, ExportFunction
from t5x.apps.ranking.reranker import Reranker
from t5x.data.vocabularies import SentencePieceVocabulary, Vocabulary

WARMUP_FILE = os.path.join("assets.extra", "tf_serving_warmup_requests")

EXTRA = "TensorFlow SavedModels need TensorFlow: `pip install -e '.[tf]'` in the checkout of t5x"


def write_warmup_requests(
    directory: str, requests: Sequence[Mapping[str, Any]], *, model_name: str, signature_name: str
) -> None:
    """Write requests that TensorFlow Serving runs when it loads a SavedModel, before it is ready.

    Args:
      directory: of the SavedModel.
      requests: {input: array or list of strings} each.
    """
    import tensorflow as tf

    os.makedirs(os.path.join(directory, os.path.dirname(WARMUP_FILE)), exist_ok=True)
    with tf.io.TFRecordWriter(os.path.join(directory, WARMUP_FILE)) as writer:
        for inputs in requests:
            tensors = {name: tf.make_tensor_proto(x).SerializeToString() for name, x in inputs.items()}
            writer.write(prediction_log(tensors, model_name, signature_name))


def prediction_log(tensors: Mapping[str, bytes], model_name: str, signature_name: str) -> bytes:
    """Return a PredictionLog with a PredictRequest.

    Args:
      tensors: {input: serialized TensorProto}.
    """
    model = _field(1, model_name.encode()) + _field(3, signature_name.encode())
    entries = [_field(1, name.encode()) + _field(2, tensor) for name, tensor in tensors.items()]
    request = _field(1, model) + b"".join(_field(2, entry) for entry in entries)
    return _field(6, _field(1, request))  # PredictionLog.predict_log.request


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of a protocol buffer."""
    size, varint = len(content), bytearray()
    while size > 127:
        varint.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *varint, size]) + content


def write(
    directory: str,
    exportable: Exportable,
    *,
    token_ids: bool = False,
    rows: int | None = None,
    warmup: Sequence[str] = (),
    name: str = "",
) -> str:
    """Write a SavedModel, run it, and return a line about the differences.

    Args:
      directory: an empty directory.
      token_ids: signatures take and return token ids instead of strings.
      rows: the only batch size; None is any.
      warmup: inputs that TensorFlow Serving runs before it is ready.
      name: of the model, in the warm-up requests.
    """
    if not token_ids:
        for vocabulary in (exportable.loaded.model.input_vocabulary, exportable.loaded.model.output_vocabulary):
            check_vocabulary(vocabulary)
    tf = import_extra("tensorflow", EXTRA)
    ranker = None if token_ids else _ranker(exportable)
    module = tf.Module()
    programs = exportable.programs()
    module.weights = {key: tf.Variable(x, trainable=False, name=key) for key, x in exportable.arrays.items()}
    calls = {
        key: tensorflow_function(exportable.export(program, DEFAULT_PLATFORMS, rows), module.weights)
        for key, program in programs.items() if key != "encode"
    }  # fmt: skip
    if token_ids:
        signatures = _id_signatures(programs, calls, rows)
    else:
        signatures = _text_signatures(module, exportable, calls, ranker, rows)
    signatures["serving_default"] = signatures["predict"]
    tf.saved_model.save(module, directory, signatures)
    if warmup:
        requests = [{"text_batch": [text] * (rows or 1)} for text in warmup]
        write_warmup_requests(directory, requests, model_name=name, signature_name="serving_default")
    saved = tf.saved_model.load(directory)

    def run(signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        outputs = saved.signatures[signature](**{key: tf.constant(x) for key, x in inputs.items()})
        return {key: x.numpy() for key, x in outputs.items()}

    if token_ids:
        return checking.compare_ids(
            exportable, lambda key, *ids: run(key, **dict(zip(programs[key].inputs, ids, strict=True)))
        )
    ranked = None if ranker is None else lambda pairs: [result.score for result in ranker.rank(pairs)]
    return checking.compare_texts(exportable, run, ranked)


def tensorflow_function(exported: export.Exported, weights: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return a function of int32 tensors that runs a program, as `jax2tf.convert` does.

    jax2tf itself writes StableHLO that the TensorFlow of the same month cannot read.

    Args:
      weights: {parameter: tf.Variable}.
    """
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.python import xla

    def shape(aval: Any) -> list[int | None]:
        return [None if is_symbolic_dim(n) else n for n in aval.shape]

    def run(*ids: Any) -> dict[str, Any]:
        arguments = [*(weights[name] for name in sorted(weights)), *ids]
        outputs = xla.call_module(
            [arguments[i] for i in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=exported.mlir_module_serialized,
            platforms=[name.upper() for name in exported.platforms],
            Tout=[tf.dtypes.as_dtype(aval.dtype) for aval in exported.out_avals],
            Sout=[shape(aval) for aval in exported.out_avals],
        )
        return jax.tree.unflatten(exported.out_tree, outputs)

    return run


def check_vocabulary(vocabulary: Vocabulary) -> SentencePieceVocabulary:
    """Return the vocabulary. Raise a UserError unless TensorFlow can encode and decode with it."""
    if not isinstance(vocabulary, SentencePieceVocabulary) or vocabulary.eos_id is None:
        raise UserError(
            f"The vocabulary is a {type(vocabulary).__name__}; only SentencePiece models with an EOS can be part of a "
            "SavedModel. "
            "Pass --token_ids, for signatures that take and return token ids."
        )
    return vocabulary


class TensorFlowTokenizer:
    """A SentencePiece model in a TensorFlow graph, with the semantics of our vocabularies.

    Args:
      eos_ids: the tokens that end an output, besides the vocabulary's EOS.

    Attributes:
      resource: the object of tensorflow-text, which a module must keep to save it.
    """

    def __init__(self, vocabulary: Vocabulary, eos_ids: Sequence[int | None] = ()):
        vocabulary, text = check_vocabulary(vocabulary), import_extra("tensorflow_text", EXTRA)
        self.resource = text.SentencepieceTokenizer(vocabulary.tokenizer.serialized_model_proto())
        self._vocabulary = vocabulary
        self._ends = {vocabulary.eos_id, *eos_ids}

    def ragged(self, strings: Any) -> Any:
        """Return the ids of strings, ragged int32 [rows, …], without EOS."""
        return self.resource.tokenize(strings)

    def encode(self, strings: Any, columns: int) -> Any:
        """Return int32 [rows, columns] with EOS, truncated and padded."""
        return self.pad(self.ragged(strings)[:, : columns - 1], columns)

    def pad(self, ids: Any, columns: int) -> Any:
        """Append EOS to ragged ids, and pad them."""
        import tensorflow as tf

        end = tf.fill([ids.nrows(), 1], tf.constant(self._vocabulary.eos_id, tf.int32))
        return tf.concat([ids, end], axis=1).to_tensor(self._vocabulary.pad_id, shape=[None, columns])

    def decode(self, ids: Any) -> Any:
        """Return the strings [...] of ids int32 [..., columns]: up to EOS, or without the padding at the end."""
        import tensorflow as tf

        is_end = tf.add_n([tf.cast(tf.equal(ids, end), tf.int32) for end in self._ends])
        before_end = tf.equal(tf.cumsum(is_end, axis=-1), 0)
        is_text = tf.cumsum(tf.cast(tf.not_equal(ids, self._vocabulary.pad_id), tf.int32), axis=-1, reverse=True) > 0
        flat = tf.reshape(ids, [-1, ids.shape[-1]])
        known = tf.where(flat < self._vocabulary.vocab_size, flat, self._vocabulary.unk_id or 0)
        rows = tf.ragged.boolean_mask(known, tf.reshape(before_end & is_text, tf.shape(flat)))
        return tf.reshape(self.resource.detokenize(rows), tf.shape(ids)[:-1])


def _text_signatures(
    module: Any, exportable: Exportable, calls: Mapping[str, Any], ranker: Reranker | None, rows: int | None
) -> dict[str, Any]:
    import tensorflow as tf

    model, columns = exportable.loaded.model, exportable.max_input_length
    inputs = TensorFlowTokenizer(model.input_vocabulary)
    outputs = TensorFlowTokenizer(model.output_vocabulary, model.eos_ids)
    module.tokenizers = [inputs.resource, outputs.resource]

    def strings(name: str) -> Any:
        return tf.TensorSpec([rows], tf.string, name)

    def generating(call: Any) -> Any:
        @tf.function(autograph=False, input_signature=[strings("text_batch")])
        def generate(text_batch: Any) -> dict[str, Any]:
            results = call(inputs.encode(text_batch, columns))
            return {"text": outputs.decode(results["output_ids"]), "score": results["score"]}

        return generate

    @tf.function(autograph=False, input_signature=[strings("text_batch"), strings("targets")])
    def score(text_batch: Any, targets: Any) -> dict[str, Any]:
        return calls["score"](inputs.encode(text_batch, columns), outputs.encode(targets, exportable.max_length))

    signatures = {name: generating(calls[name]) for name in exportable.decodings()} | {"score": score}
    if ranker is None:
        return signatures
    labels = tf.constant([ranker.labels], tf.int32)

    @tf.function(autograph=False, input_signature=[strings("query"), strings("document")])
    def rank(query: Any, document: Any) -> dict[str, Any]:
        ids = _ranker_ids(ranker, inputs, query, document)
        logits = calls["rank"](ids, tf.tile(labels, [tf.shape(ids)[0], 1]))["logits"]
        return {"score": tf.nn.log_softmax(logits)[:, 0] if len(ranker.labels) > 1 else logits[:, 0], "logits": logits}

    return signatures | {"rank": rank}


def _ranker(exportable: Exportable) -> Reranker | None:
    """Return the ranker of the model; None if its labels are not tokens, inputs too short, or it compares passages."""
    try:
        ranker = Reranker(exportable.loaded, max_length=exportable.max_input_length)
        ranker.inputs.check(checking.QUERY)
        return ranker
    except UserError as error:
        exportable.loaded.log_once(f"no signature `rank`: {error}")
        return None


def _ranker_ids(ranker: Reranker, tokenizer: TensorFlowTokenizer, query: Any, document: Any) -> Any:
    """Return what `ranking.templates.InputEncoder` returns; documents that are too long are truncated."""
    import tensorflow as tf

    columns = ranker.template.max_length
    before, after = ranker.template.between("{query}")
    whole = tokenizer.ragged(tf.strings.join([_filled(before, query), document, _filled(after, query)]))
    pieces = [tokenizer.ragged(x) for x in (_filled(before.strip(), query), _filled(after.strip(), query))]
    of_document = tokenizer.ragged(tf.strings.strip(document))
    spaces = [
        tf.tile(tf.constant([ranker.inputs.separator if spaced else []], tf.int32), [tf.shape(query)[0], 1])
        for spaced in (before != before.rstrip(), after != after.lstrip())
    ]
    used = sum(x.row_lengths() for x in pieces) + sum(x.shape[1] for x in spaces)
    room = tf.clip_by_value(columns - 1 - used, 0, of_document.row_lengths())
    document = tf.RaggedTensor.from_tensor(of_document.to_tensor(), room)
    cut = tf.concat([pieces[0], spaces[0], document, spaces[1], pieces[1]], axis=1)[:, : columns - 1]
    fits = whole.row_lengths() < columns
    return tf.where(fits[:, None], tokenizer.pad(whole[:, : columns - 1], columns), tokenizer.pad(cut, columns))


def _filled(text: str, query: Any) -> Any:
    """Return the string tensor of a template's part, with the query in its place."""
    import tensorflow as tf

    before, mark, after = text.partition("{query}")
    return tf.strings.join([before, query, after]) if mark else tf.fill(tf.shape(query), text)


def _id_signatures(
    programs: Mapping[str, ExportFunction], calls: Mapping[str, Any], rows: int | None
) -> dict[str, Any]:
    import tensorflow as tf

    def signature(call: Any, inputs: Mapping[str, int | None]) -> Any:
        specs = [tf.TensorSpec([rows, columns], tf.int32, name) for name, columns in inputs.items()]
        return tf.function(call, autograph=False, input_signature=specs)

    return {name: signature(call, programs[name].inputs) for name, call in calls.items()}

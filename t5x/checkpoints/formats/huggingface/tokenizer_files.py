"""Translation between tokenizer files of a Hugging Face directory and the files of `Vocabulary.to_files`."""

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats.huggingface.config_json import kept_fields, read_json
from t5x.data.vocabularies import (
    ByteVocabulary,
    HuggingFaceVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from t5x.data.vocabularies.base import MAX_EXTRA_IDS
from t5x.data.vocabularies.huggingface import MAX_TOKENIZER_BYTES
from t5x.data.vocabularies.loading import rebuild_vocabulary
from t5x.files.user_files import read_regular

logger = logging.getLogger(__name__)

MODEL = "spiece.model"
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
FILES = (MODEL, TOKENIZER, SETTINGS)
_SPECIAL = "special_tokens_map.json"
_SPACE = "\u2581"  # SentencePiece's symbol for a space

_SupportedVocabulary = ByteVocabulary | SentencePieceVocabulary | HuggingFaceVocabulary


def read_vocabulary(path: str, vocab_size: int, tokenizer_class: Any, pad_id: int) -> Vocabulary | None:
    """Return the vocabulary of a directory; None and a warning if there is none.

    spiece.model takes precedence over tokenizer.json, the only one that version 5 of transformers writes.

    Args:
      path: the directory.
      vocab_size: number of rows of the model's embedding.
      tokenizer_class: the class named in config.json, or None.
      pad_id: the padding token of the model.
    """
    settings = read_json(f"{path}/{SETTINGS}") if os.path.lexists(f"{path}/{SETTINGS}") else {}
    if "ByT5Tokenizer" in (settings.get("tokenizer_class"), tokenizer_class):
        stated = _stated_extra_ids(settings)
        vocabulary: Vocabulary = ByteVocabulary(extra_ids=125 if stated is None else stated)
    elif os.path.exists(f"{path}/{MODEL}"):
        vocabulary = _sentencepiece(f"{path}/{MODEL}", vocab_size, _stated_extra_ids(settings), pad_id)
    elif os.path.exists(f"{path}/{TOKENIZER}"):
        vocabulary = HuggingFaceVocabulary(f"{path}/{TOKENIZER}", pad_id)
    else:
        logger.warning(
            "%s has neither %s nor %s, so the model is loaded without a vocabulary. Copy the file of the model it was "
            "trained from into the directory, or set a vocabulary in the gin configuration.",
            path,
            MODEL,
            TOKENIZER,
        )
        return None
    if vocabulary.vocab_size > vocab_size:
        raise UserError(
            f"{path}: the vocabulary has {vocabulary.vocab_size} ids, but the model's embedding has {vocab_size} rows. "
            "Use the tokenizer files of this model."
        )
    return vocabulary


def kept_files(path: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return files that are kept for conversion back to Hugging Face: see `Source.huggingface_files`.

    Args:
      config: the content of config.json.
      generation: the content of generation_config.json, if there is one.
    """
    files = {CONFIG: json.dumps(kept_fields(config), indent=2).encode()}
    if generation is not None:
        files[GENERATION] = json.dumps(generation, indent=2).encode()
    if os.path.exists(f"{path}/{MODEL}") and os.path.exists(f"{path}/{TOKENIZER}"):
        files[TOKENIZER] = read_regular(f"{path}/{TOKENIZER}", max_bytes=MAX_TOKENIZER_BYTES)
    return files


def _stated_extra_ids(settings: Mapping[str, Any]) -> int | None:
    """Return the number of sentinels in tokenizer_config.json, given as a number or as a list."""
    listed = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    count = len({str(token) for token in listed if "<extra_id_" in str(token)}) if isinstance(listed, list) else 0
    stated = settings.get("extra_ids")
    if type(stated) is not int or not 0 <= stated <= MAX_EXTRA_IDS:
        return count or None
    return max(stated, count)


def _sentencepiece(path: str, vocab_size: int, extra_ids: int | None, pad_id: int) -> SentencePieceVocabulary:
    """Load the model; if it has no sentinels (mT5's has), add the stated number, or else 100 if they fit."""
    missing = SentencePieceVocabulary(path).missing_sentinels(vocab_size, extra_ids)
    return SentencePieceVocabulary(path, extra_ids=missing, pad_id=pad_id)


def single_vocabulary(vocabulary_files: Mapping[str, Mapping[str, bytes]]) -> _SupportedVocabulary | None:
    """Return the vocabulary of all features; None and a warning if Hugging Face has no tokenizer for it."""
    if not vocabulary_files:
        logger.warning("Writing no tokenizer files: the source has no vocabulary.")
        return None
    vocabularies = {
        f: rebuild_vocabulary(files.__getitem__, f"the vocabulary of {f}") for f, files in vocabulary_files.items()
    }
    first = next(iter(vocabularies.values()))
    if any(vocabulary != first for vocabulary in vocabularies.values()):
        logger.warning(
            "Writing no tokenizer files: the features %s have different vocabularies, and Hugging Face has one "
            "tokenizer for all.",
            ", ".join(vocabularies),
        )
        return None
    if not isinstance(first, _SupportedVocabulary):
        logger.warning("Writing no tokenizer files: Hugging Face has no tokenizer for %r.", first)
        return None
    return first


def tokenizer_files(vocabulary: _SupportedVocabulary) -> dict[str, bytes]:
    """Return {name: content} of files with which `transformers.AutoTokenizer` yields the ids of `vocabulary`, plus EOS.

    T5's own vocabulary becomes a T5Tokenizer, bytes a ByT5Tokenizer. What those two do not support (bytes for unknown
    characters as in mT5, preserved spaces as in umT5, other ids of the special tokens) is written as a tokenizer.json.
    An existing tokenizer.json is kept as it is, unless it does not add EOS.
    """
    if isinstance(vocabulary, HuggingFaceVocabulary):
        return {TOKENIZER: _with_eos(vocabulary)} | _settings_files(
            "PreTrainedTokenizerFast", 0, *_special_tokens(vocabulary)
        )
    if isinstance(vocabulary, ByteVocabulary):
        return _settings_files("ByT5Tokenizer", vocabulary.extra_ids, "</s>", "<unk>", "<pad>")
    from sentencepiece import sentencepiece_model_pb2

    content = vocabulary.to_files()
    whole = vocabulary.tokenizer.serialized_model_proto()  # includes the extra ids and any overrides
    model = sentencepiece_model_pb2.ModelProto.FromString(whole)  # type: ignore[attr-defined]
    if _is_t5s(vocabulary, model):
        (spiece,) = (data for name, data in content.items() if name.endswith(".model"))
        return {MODEL: spiece} | _settings_files("T5Tokenizer", vocabulary.extra_ids, "</s>", "<unk>", "<pad>")
    if model.trainer_spec.model_type != model.trainer_spec.UNIGRAM or vocabulary.eos_id is None:
        logger.warning(
            "Writing only %s: Hugging Face's T5 tokenizers need a unigram model with an EOS piece, which this "
            "SentencePiece model is not.",
            MODEL,
        )
        return {MODEL: whole}
    special = [model.pieces[i].piece for i in (vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id)]
    described = json.dumps(_tokenizer_json(model, vocabulary), ensure_ascii=False).encode()
    return {MODEL: whole, TOKENIZER: described} | _settings_files("PreTrainedTokenizerFast", 0, *special)


def _special_tokens(vocabulary: HuggingFaceVocabulary) -> list[str | None]:
    """Return EOS, unknown, padding. Id 0 may be an ordinary word, which transformers must not treat as special."""
    tokens = vocabulary.tokenizer
    known = tokens.get_added_tokens_decoder()
    pad = known[vocabulary.pad_id].content if vocabulary.pad_id in known else None
    return [None if i is None else tokens.id_to_token(i) for i in (vocabulary.eos_id, vocabulary.unk_id)] + [pad]


def _with_eos(vocabulary: HuggingFaceVocabulary) -> bytes:
    """Return the tokenizer.json, changed if needed to add EOS, and nothing else, to every input."""
    content = vocabulary.to_files()[TOKENIZER]
    if vocabulary.eos_id is None or vocabulary.tokenizer.encode("").ids == [vocabulary.eos_id]:
        return content
    processor = _post_processor(vocabulary.tokenizer.id_to_token(vocabulary.eos_id), vocabulary.eos_id)
    return json.dumps(json.loads(content) | {"post_processor": processor}, ensure_ascii=False).encode()


def _post_processor(eos: str, eos_id: int) -> dict[str, Any]:
    once, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": eos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [once, end],
        "pair": [once, end, {"Sequence": {"id": "B", "type_id": 0}}, end],
        "special_tokens": {eos: {"id": eos, "ids": [eos_id], "tokens": [eos]}},
    }


def _settings_files(
    tokenizer_class: str, extra_ids: int, eos: str | None, unk: str | None, pad: str | None
) -> dict[str, bytes]:
    tokens = {"eos_token": eos, "unk_token": unk, "pad_token": pad}
    special: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    if extra_ids:
        special["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(extra_ids)]
    settings = special | {
        "tokenizer_class": tokenizer_class,
        "extra_ids": extra_ids,
        "clean_up_tokenization_spaces": False,
    }
    return {
        name: (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
        for name, content in ((SETTINGS, settings), (_SPECIAL, special))
    }


def _is_t5s(vocabulary: SentencePieceVocabulary, model: Any) -> bool:
    """Return whether transformers' T5Tokenizer, with its built-in settings, tokenizes like this model."""
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    kinds = model.SentencePiece
    user_defined = sum(piece.type == kinds.USER_DEFINED for piece in model.pieces)
    return (
        [piece.piece for piece in model.pieces[:3]] == ["<pad>", "</s>", "<unk>"]
        and (vocabulary.eos_id, vocabulary.unk_id) == (1, 2)
        and trainer.model_type == trainer.UNIGRAM
        and not trainer.byte_fallback
        and not trainer.treat_whitespace_as_suffix
        and normalizer.add_dummy_prefix
        and normalizer.remove_extra_whitespaces
        and not vocabulary.normalizer_spec_overrides
        and vocabulary.reverse_extra_ids
        and user_defined == vocabulary.extra_ids
    )


def _tokenizer_json(model: Any, vocabulary: SentencePieceVocabulary) -> dict[str, Any]:
    """Return a unigram tokenizer of the `tokenizers` library that is equivalent to SentencePiece with `model`.

    User-defined pieces, including sentinels, are ordinary entries with a score that lets them win, as in SentencePiece
    itself; only the special tokens are matched before everything else.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    settings, kinds = model.normalizer_spec, model.SentencePiece
    highest = max((piece.score for piece in model.pieces if piece.type == kinds.NORMAL), default=0.0)
    entries = []
    for piece in model.pieces:
        defined = piece.type == kinds.USER_DEFINED
        entries.append((piece.piece, len(piece.piece.encode()) * highest - 0.1 if defined else piece.score))
    tokenizer = Tokenizer(models.Unigram(entries, vocabulary.unk_id, model.trainer_spec.byte_fallback))
    special = [piece.piece for piece in model.pieces if piece.type in (kinds.CONTROL, kinds.UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])

    steps: list[normalizers.Normalizer] = []
    decoding: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if settings.precompiled_charsmap:
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if settings.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(decoding)
    eos = model.pieces[vocabulary.eos_id].piece
    return json.loads(tokenizer.to_str()) | {"post_processor": _post_processor(eos, vocabulary.eos_id)}

"""Tokenizers of Hugging Face, in their own file format."""

import hashlib
import json
import logging
import os
import re
from typing import Any

from t5x.data import files
from t5x.data.vocabularies.base import PAD_ID, Vocabulary, utf8
from t5x.errors import UserError

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
# The file lists special tokens without saying what they are for: these are the names in use.
_PAD = ("<pad>", "[PAD]", "<|pad|>")
_EOS = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")
_UNK = ("<unk>", "[UNK]", "<|unk|>")
_EXTRA_ID = re.compile(r"▁?<extra_id_\d+>")


class HuggingFaceVocabulary(Vocabulary):
    """A `tokenizer.json` of Hugging Face, read with their `tokenizers` library when it is first needed.

    The file is taken as it is: sentinels are those in it (T5's has `<extra_id_0>` … already), its special tokens are
    found by their usual names (`<pad>`, `</s>`, …), and what it says about truncation, padding and adding special
    tokens is left out: `encode` gives the text's ids alone. Decoding leaves out padding and EOS; sentinels stay.

    Text that spells a special token (`</s>`) becomes that token, as everywhere in Hugging Face; in SentencePiece it is
    text like any other.

    Args:
      tokenizer_file: local or remote path of the file.
    """

    def __init__(self, tokenizer_file: str):
        self.tokenizer_file = os.fspath(tokenizer_file)
        self._loaded = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    @property
    def _tokenizer(self) -> "_Tokenizer":
        if self._loaded is None:
            self._loaded = _Tokenizer(self.tokenizer_file)
        return self._loaded

    @property
    def tokenizer(self) -> Any:
        """The tokenizers.Tokenizer."""
        return self._tokenizer.tokenizer

    @property
    def extra_ids(self) -> int:
        """How many sentinels the file has."""
        return self._tokenizer.extra_ids

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int | None:
        return self._tokenizer.bos_id

    @property
    def unk_id(self) -> int | None:
        return self._tokenizer.unk_id

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.size

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(utf8(text).decode(), add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        shown = [i for i in ids if i not in (self.pad_id, self.eos_id)]
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def description(self) -> dict[str, Any]:
        return {"class": "HuggingFaceVocabulary"}

    def to_files(self) -> dict[str, bytes]:
        return super().to_files() | {TOKENIZER_FILE: self._tokenizer.content}

    @property
    def fingerprint(self) -> str:
        return self._tokenizer.fingerprint

    def __repr__(self) -> str:
        return f"HuggingFaceVocabulary({self.tokenizer_file!r})"


class _Tokenizer:
    """A loaded tokenizer. `content` is the file as it was."""

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(
                f"Reading {path} needs the package tokenizers, which is not installed. `pip install tokenizers`, or "
                "`pip install -e '.[hf]'` in the checkout of t5x."
            ) from error
        self.content = files.read_bytes(path)
        try:
            described = json.loads(self.content)
            if not isinstance(described, dict):
                raise ValueError("it holds no JSON object")
            self.tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
            if not self.tokenizer.get_vocab_size():
                raise ValueError("its vocabulary is empty")
        except BaseException as error:  # the library raises no narrower class, and panics of Rust are no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(
                f"{path} is not a {TOKENIZER_FILE} of Hugging Face that tokenizers {tokenizers.__version__} can read: "
                f"{error}"
            ) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values()) + 1
        self.extra_ids = sum(_EXTRA_ID.fullmatch(token) is not None for token in ids)
        pad_id, self.eos_id, self.bos_id, self.unk_id = (
            next((ids[name] for name in names if name in ids), None) for names in (_PAD, _EOS, _BOS, _UNK)
        )
        if pad_id != PAD_ID:
            logger.warning(
                "%s has %s; padding is 0 here, which is its token %r.",
                path,
                "no padding token" if pad_id is None else f"pad id {pad_id}",
                self.tokenizer.id_to_token(PAD_ID),
            )
        # How a file wants batches cut and filled changes nothing here.
        content = {name: value for name, value in described.items() if name not in ("truncation", "padding")}
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

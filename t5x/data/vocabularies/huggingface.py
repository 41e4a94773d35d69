"""Hugging Face tokenizers, in their own file format."""

import contextlib
import hashlib
import json
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

from t5x._runtime.errors import UserError
from t5x.data.vocabularies.base import MAX_TOKEN_LENGTH, PAD_ID, FileVocabulary, check_padding, check_tokenizer, utf8
from t5x.files import user_files
from t5x.files.untrusted import parse_json

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 * 2**20  # files with 250,000 ids have 20 million
# The file does not record the roles of special tokens; these are the usual names.
_PAD = ("<pad>", "[PAD]", "<|pad|>")
_EOS = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")
_UNK = ("<unk>", "[UNK]", "<|unk|>")
_EXTRA_ID = re.compile(r"▁?<extra_id_\d+>")


class HuggingFaceVocabulary(FileVocabulary):
    """A `tokenizer.json` of Hugging Face, loaded with the `tokenizers` library on first use.

    The file is used as it is: sentinels are those in it (T5's already has `<extra_id_0>` …), and special tokens are
    found by their usual names (`<pad>`, `</s>`, …). Its settings for truncation, padding and adding special tokens are
    ignored: `encode` returns only the ids of the text. Decoding drops padding and EOS and keeps sentinels.

    Text that spells a special token (`</s>`) becomes that token, as everywhere in Hugging Face; in SentencePiece it is
    ordinary text.

    Args:
      tokenizer_file: local or remote path of the file.
      pad_id: the padding token of the network.
    """

    stored_name = TOKENIZER_FILE

    def __init__(self, tokenizer_file: str, pad_id: int = PAD_ID):
        super().__init__(pad_id)
        self.tokenizer_file = os.fspath(tokenizer_file)

    def _load(self) -> "_Tokenizer":
        return _Tokenizer(self.tokenizer_file, self._content, self.pad_id)

    # The number of sentinels in the file.
    extra_ids = property(operator.attrgetter("_model.extra_ids"))  # type: ignore[assignment]

    def encode(self, text: str) -> list[int]:
        text = utf8(text).decode()
        with _explained(f"{self.tokenizer_file} cannot tokenize {text[:60]!r}"):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        kept = [i for i in ids if i not in (self.pad_id, self.eos_id)]
        with _explained(f"{self.tokenizer_file} cannot decode the ids {str(kept[:20])[1:-1]}"):
            return self.tokenizer.decode(kept, skip_special_tokens=False)

    def description(self) -> dict[str, Any]:
        return {"class": "HuggingFaceVocabulary"} | ({"pad_id": self.pad_id} if self.pad_id else {})

    def __repr__(self) -> str:
        return f"HuggingFaceVocabulary({self.tokenizer_file!r})"


class _Tokenizer:
    """A loaded tokenizer. `content` is the unmodified file."""

    def __init__(self, path: str, content: bytes | None, network_pad_id: int):
        import tokenizers  # here, because it takes 0.2 s

        self.content = user_files.read_regular(path, max_bytes=MAX_TOKENIZER_BYTES) if content is None else content
        with _explained(
            f"{path} is not a {TOKENIZER_FILE} of Hugging Face that tokenizers {tokenizers.__version__} can read"
        ):
            described = parse_json(self.content, max_bytes=MAX_TOKENIZER_BYTES)
            if not isinstance(described, dict):
                raise ValueError("it is not a JSON object")
            check_tokenizer(described)
            self.tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
            if not self.tokenizer.get_vocab_size():
                raise ValueError("its vocabulary is empty")
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            ids = self.tokenizer.get_vocab(with_added_tokens=True)
            if (longest := max(map(len, ids))) > MAX_TOKEN_LENGTH:
                raise ValueError(f"it has a token of {longest:,} characters")
        self.size = max(ids.values()) + 1
        self.extra_ids = sum(_EXTRA_ID.fullmatch(token) is not None for token in ids)
        pad_id, self.eos_id, self.bos_id, self.unk_id = (
            next((ids[name] for name in names if name in ids), None) for names in (_PAD, _EOS, _BOS, _UNK)
        )
        check_padding(path, network_pad_id, pad_id, self.tokenizer.id_to_token(PAD_ID))
        # Truncation and padding settings have no effect here.
        settings = {name: value for name, value in described.items() if name not in ("truncation", "padding")}
        self.fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Convert errors of tokenizers to a UserError. The library has no narrower class; panics are not Exceptions."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {error}") from error

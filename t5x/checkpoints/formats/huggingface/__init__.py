"""Hugging Face directories of the T5 family: config.json, safetensors, tokenizer files.

`names` says which tensor is which parameter, `config` translates config.json, `container` is the safetensors file
format, `tokenizer` translates tokenizer files; `reading` and `writing` put them together.
"""

from t5x.checkpoints.formats.huggingface.reading import read_huggingface
from t5x.checkpoints.formats.huggingface.writing import write_huggingface

__all__ = ["read_huggingface", "write_huggingface"]

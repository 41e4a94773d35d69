"""Hugging Face directories of the T5 family: config.json, safetensors, tokenizer files.

`names` maps tensors to parameters, `config` translates config.json, `container` implements the safetensors format,
`tokenizer` translates tokenizer files; `reading` and `writing` combine them.
"""

from t5x.checkpoints.formats.huggingface.reading import read_huggingface
from t5x.checkpoints.formats.huggingface.writing import write_huggingface

__all__ = ["read_huggingface", "write_huggingface"]

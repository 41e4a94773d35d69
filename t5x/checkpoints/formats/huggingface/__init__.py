"""Hugging Face directories of the T5 family: config.json, safetensors, tokenizer files."""

from t5x.checkpoints.formats.huggingface.reader import read_huggingface
from t5x.checkpoints.formats.huggingface.writer import write_huggingface

__all__ = ["read_huggingface", "write_huggingface"]

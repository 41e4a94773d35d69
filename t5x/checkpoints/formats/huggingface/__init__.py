"""Hugging Face directories of the T5 family: config.json, safetensors, tokenizer files."""

from t5x.checkpoints.formats.huggingface.model_directory import read_huggingface, write_huggingface

__all__ = ["read_huggingface", "write_huggingface"]

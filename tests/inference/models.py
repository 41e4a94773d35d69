"""A tiny model over bytes, as a Hugging Face directory, made without transformers."""

import json
from pathlib import Path

import numpy as np

from tests.checkpoints.formats.huggingface_models import tiny_config, tiny_tensors, write_directory

ROWS, WIDTH = 384, 16
LETTERS = "abcdefgh "


def byte_model(path: Path, seed: int = 3) -> Path:
    """Writes a T5 1.0 of one layer each; its predictions differ from input to input, and some end early.

    They are of a few letters: other rows of its table are near 0.
    """
    rng = np.random.default_rng(seed)
    shapes = {name: [WIDTH if size == 4 else size for size in value.shape] for name, value in tiny_tensors().items()}
    tensors = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for name in tensors:
        if "EncDecAttention" in name:
            tensors[name] *= 3
    table = rng.standard_normal((ROWS, WIDTH))
    common = [1, *(byte + 3 for byte in LETTERS.encode())]
    tensors["shared.weight"] = 0.1 * table
    tensors["shared.weight"][common] = 8 * table[common] / np.linalg.norm(table[common], axis=1, keepdims=True)
    tensors["shared.weight"][1] += tensors["shared.weight"][ord("g") + 3]  # EOS, where a g would be
    write_directory(path, tensors, tiny_config(vocab_size=ROWS, d_model=WIDTH))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    return path


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts that are short or long, so that few programs are compiled."""
    rng = np.random.default_rng(seed)
    sizes = np.where(rng.random(count) < 0.6, rng.integers(0, 8, count), rng.integers(18, 26, count))
    return ["".join(rng.choice(list(LETTERS), size)) for size in sizes]

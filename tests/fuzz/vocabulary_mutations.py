"""Changes to vocabularies: SentencePiece models, tokenizer.json, and what our own checkpoints say of them."""

import base64
import json
import random
import struct
from pathlib import Path

from tests.fuzz.file_mutations import checkpoint_in, read, repair_checkpoint, same_outside, write
from tests.fuzz.value_mutations import HUGE, mutate_json

REGEXES = (
    r"(a+)+$", r"(\w*)*x", r"(a|a)*$", r"(?:a|ab|b)*c", r"(.+)+\1$", r"(\w+\s?)*$", r"((a*)*)*b", r"(?=(\w+)+b)",
    r"a*a*a*a*a*a*a*$", r"\w*\w*\w*\w*\w*\w*\d", r"(?:a{0,500}){0,500}$", "(", "[", "*", r"\p{Nope}", "(?<x>a)\\g<x>*",
    "(" * 2000, "a{999999999}", "(?~|a|)", "",
)  # fmt: skip


def change_vocabulary_json(rng: random.Random, directory: Path, outside: Path) -> str:
    file = checkpoint_in(directory) / "vocabulary" / rng.choice(("inputs", "targets")) / "vocabulary.json"
    described = json.loads(read(file))
    if rng.random() < 0.5:
        content, where = mutate_json(json.dumps(described).encode(), rng, outside)
    else:
        changes = rng.choice((
            {"extra_ids": rng.choice(HUGE)}, {"extra_ids": "5"}, {"extra_ids": -1}, {"class": "ByteVocabulary"},
            {"class": "PassThroughVocabulary", "size": 10**9}, {"normalizer_spec_overrides": {"name": [1]}},
            {"normalizer_spec_overrides": {"nope": 1}}, {"sentencepiece_model_file": str(outside)},
            {"class": "os.system"},
        ))  # fmt: skip
        content, where = json.dumps(described | changes).encode(), str(changes)
    write(file, content)
    return f"{file.parent.name}/vocabulary.json: {where}"


def hide_vocabulary(rng: random.Random, directory: Path, outside: Path) -> str:
    """A file of the vocabulary that the manifest does not list, a link out of the checkpoint."""
    inner = checkpoint_in(directory)
    file = inner / "vocabulary" / rng.choice(("inputs/sentencepiece.model", "targets/tokenizer.json"))
    file.unlink()
    repair_checkpoint(inner)
    file.symlink_to(same_outside(directory, file, outside))
    return f"{file.name} is a link that the manifest does not list"


def change_sentencepiece(rng: random.Random, directory: Path, outside: Path) -> str:
    from sentencepiece import sentencepiece_model_pb2

    inner = checkpoint_in(directory)
    file = inner / "vocabulary/inputs/sentencepiece.model"
    file = file if file.exists() else inner / "spiece.model"
    model = sentencepiece_model_pb2.ModelProto.FromString(read(file))
    piece = rng.choice(model.pieces)
    kind = rng.choice(("score", "type", "text", "twice", "many", "none", "charsmap", "growth", "trainer", "wire"))
    if kind == "score":
        piece.score = rng.choice((float("nan"), float("inf"), -float("inf"), 1e38, 0))
    elif kind == "type":
        piece.type = rng.randint(1, 6)
    elif kind == "text":
        piece.piece = rng.choice(("", "▁" * 1000, "a" * 100_000, "<unk>", "</s>", "\0", model.pieces[5].piece))
    elif kind == "twice":
        model.pieces.add(piece=piece.piece, score=-1)
    elif kind == "many":
        for i in range(3000):
            model.pieces.add(piece=f"x{i}", score=-i)
    elif kind == "none":
        del model.pieces[rng.randrange(3) :]
    elif kind == "charsmap":
        spoiled = bytearray(model.normalizer_spec.precompiled_charsmap)
        for _ in range(rng.choice((1, 300))):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        model.normalizer_spec.precompiled_charsmap = bytes(spoiled)
    elif kind == "growth":
        model.normalizer_spec.precompiled_charsmap = _growing(model.normalizer_spec.precompiled_charsmap)
    elif kind == "trainer":
        spec = model.trainer_spec
        field = rng.choice(("unk_id", "eos_id", "pad_id", "model_type", "vocab_size", "byte_fallback", "unk_surface"))
        value = rng.choice((1, 2, 3, 4)) if field == "model_type" else rng.choice((-1, 0, 1, 5, 2**31 - 1))
        if field == "byte_fallback":
            value = True
        setattr(spec, field, "x" * 100_000 if field == "unk_surface" else value)
    content = bytearray(model.SerializeToString())
    if kind == "wire":
        for _ in range(rng.choice((1, 5, 50))):
            content[rng.randrange(min(len(content), 2000))] = rng.randrange(256)
    write(file, content)
    return f"{file.name}: {kind} of {piece.piece[:20]!r}"


def _growing(charsmap: bytes) -> bytes:
    """One in which every replacement is a megabyte long: what ends one replacement is only in the last byte."""
    size = int.from_bytes(charsmap[:4], "little")
    return charsmap[: 4 + size] + charsmap[4 + size :].replace(b"\0", b"a") + b"a" * 10**6 + b"\0"


def change_tokenizer(rng: random.Random, directory: Path, outside: Path) -> str:
    inner = checkpoint_in(directory)
    file = inner / "vocabulary/targets/tokenizer.json"
    file = file if file.exists() else inner / "tokenizer.json"
    content = json.loads(read(file))
    kind = rng.choice(
        ("value", "value", "value", "regex", "regex", "growth", "decoder growth", "bytes", "nested", "model")
    )
    if kind == "value":
        mutated, where = mutate_json(read(file), rng, outside)
        write(file, mutated)
        return f"{file.name}: {where}"
    if kind == "regex":
        pattern = {"Regex": rng.choice(REGEXES)}
        if rng.random() < 0.5:
            content["normalizer"] = {"type": "Replace", "pattern": pattern, "content": ""}
        else:
            content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        kind = f"regex {pattern['Regex'][:30]}"
    elif kind in ("growth", "decoder growth"):
        step = {"type": "Replace", "pattern": rng.choice(({"String": "a"}, {"Regex": "[ae]"})), "content": "aa"}
        part, inner_name = ("normalizer", "normalizers") if kind == "growth" else ("decoder", "decoders")
        content[part] = {"type": "Sequence", inner_name: [step] * rng.choice((4, 40))}
    elif kind == "bytes":
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}
    elif kind == "nested":
        for _ in range(rng.choice((20, 60, 500))):
            content["normalizer"] = {"type": "Sequence", "normalizers": [content["normalizer"]]}
    else:
        vocabulary = {piece: i for i, (piece, _) in enumerate(content["model"]["vocab"])}
        charsmap = base64.b64encode(_growing(struct.pack("<I", 1024) + bytes(1024))).decode()
        content["normalizer"] = rng.choice((None, {"type": "Precompiled", "precompiled_charsmap": charsmap}))
        content["model"] = rng.choice((
            {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]},
            {"type": "BPE", "vocab": vocabulary | {"ab": 10**9}, "merges": ["a b"], "unk_token": "<unk>"},
            {"type": "WordPiece", "vocab": vocabulary, "unk_token": "?", "continuing_subword_prefix": "",
             "max_input_chars_per_word": 10**12},
            {"type": "WordLevel", "vocab": vocabulary, "unk_token": "nope"},
            {"type": "Unigram", "unk_id": 10**9, "vocab": [["a", 0.0]]},
            {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]},
            {"type": "Unigram", "unk_id": 0, "vocab": []},
        ))  # fmt: skip
    write(file, json.dumps(content).encode())
    return f"{file.name}: {kind}"

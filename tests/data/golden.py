"""Answers of the real seqio, for tests that compare with it.

All jobs go to one run of programs/seqio_reference.py, because importing TensorFlow takes longer than everything else.
"""

import functools
import gzip
import zipfile
from pathlib import Path

import numpy as np

from tests.data.conftest import SHARED
from tests.support.programs import reference_answers

_PROGRAM = Path(__file__).parent / "programs/seqio_reference.py"

STRANGE_TEXTS = [
    "", " ", "   ", "\t\n", "a  b", "   leading", "trailing   ", "a\u00a0b\u3000c", "\ufeffbom", "line\r\nline",
    "\x00", "a\x00b", "\x00\x07", "\x1b[31mred\x1b[0m", "\x7f\x80\x9f", "\ufffd", "\U0010ffff\ue000",
    "\u200bzero\u200dwidth", "e\u0301 o\u0308\u0304", "\u0301", "a\u0300\u0301\u0302\u0303", "\u2581 under",
    "ﷺ ﬃ Ⅷ ① ½", "İstanbul ẞ ß Äpfel", "日本語", "नमस्ते", "שלום", "🤗", "👩\u200d👩\u200d👧\u200d👦 family", "🇩🇪🇦🇹",
    "<extra_id_0>", "A <extra_id_1> b <extra_id_99>", "word<extra_id_0>word", "<extra_id_0><extra_id_1>",
    "<extra_id_0>   two  spaces <extra_id_1> .", "<extra_id_100> <extra_id_299>", "</s> <pad> <unk> <s>",
    "x" * 5000, "the quick brown fox " * 3000,
]  # fmt: skip


def sentences(each: int = 400) -> list[str]:
    """Real English and German text from four sources."""
    found = []
    for name in ("val.en.gz", "val.de.gz"):
        with gzip.open(SHARED / "multi30k_ende" / name, "rt", encoding="utf-8") as file:
            found += file.read().splitlines()[:each]
    for name in ("newstest2021.en-de.src.en", "newstest2021.en-de.ref.A.de"):
        found += (SHARED / "wmt21_22_ende" / name).read_text(encoding="utf-8").splitlines()[:each]
    found += (SHARED / "wikitext2/wiki.valid.raw").read_text(encoding="utf-8").splitlines()[:each]
    with zipfile.ZipFile(SHARED / "tatoeba_ende/deu-eng.zip") as archive:
        lines = archive.read("deu.txt").decode().splitlines()[:: 169_197 // each]
        found += [text for line in lines for text in line.split("\t")[:2]]
    return found


def stream(seed: int, lengths: dict[str, int], count: int = 60) -> list[dict[str, list[int]]]:
    """Random examples of 1 to the full length of each feature, most of them short."""
    random = np.random.default_rng(seed)
    sizes = {f: np.clip(random.geometric(3 / length, count), 1, length) for f, length in lengths.items()}
    return [{feature: random.integers(2, 30, sizes[feature][i]).tolist() for feature in lengths} for i in range(count)]


def aligned(seed: int, length: int) -> list[dict[str, list[int]]]:
    """Random examples whose inputs have id 9 in places of their targets."""
    targets = stream(seed, {"targets": length})
    random = np.random.default_rng(seed)
    return [
        {"inputs": [9 if random.random() < 0.3 else i for i in one["targets"]], "targets": one["targets"]}
        for one in targets
    ]


def converter_jobs() -> dict[str, dict]:
    jobs = {}

    def add(name, kind, lengths, examples, **arguments):
        jobs[name] = {"class": kind, "arguments": arguments, "lengths": lengths, "examples": examples}

    both, targets, square = {"inputs": 23, "targets": 17}, {"targets": 17}, {"inputs": 19, "targets": 19}
    long = stream(8, {"inputs": 40, "targets": 30})
    for pack in (True, False):
        mode = "packed" if pack else "one"
        add(f"encdec_{mode}", "EncDecFeatureConverter", both, stream(0, both), pack=pack, bos_id=7)
        add(f"encdec_cut_{mode}", "EncDecFeatureConverter", both, long, pack=pack, apply_length_check=False)
        add(f"lm_{mode}", "DecoderFeatureConverter", targets, stream(1, targets), pack=pack)
        add(f"prefix_{mode}", "DecoderFeatureConverter", both, stream(2, both), pack=pack, bos_id=7)
        add(f"prefix_cut_{mode}", "PrefixLMFeatureConverter", both, long, pack=pack, apply_length_check=False)
        name, kind = f"prefix_all_{mode}", "PrefixLMFeatureConverter"
        add(name, kind, both, stream(3, both), pack=pack, loss_on_targets_only=False)
        add(f"encoder_{mode}", "EncoderFeatureConverter", square, aligned(4, 19), pack=pack, mask_id=9)
    wide = {"inputs": 512, "targets": 114}
    add("encdec_wide", "EncDecFeatureConverter", wide, stream(5, {"inputs": 200, "targets": 60}, 200), pack=True)
    nothing_in_some = [{"targets": [4, 1]}, {"targets": []}, {"targets": [5, 6, 1]}, {"targets": []}]
    add("lm_empty", "LMFeatureConverter", targets, nothing_in_some, pack=True)
    prefix_of_none = [{"inputs": [], "targets": [4, 1]}, {"inputs": [6, 6], "targets": [2]}]
    add("prefix_empty", "PrefixLMFeatureConverter", both, prefix_of_none, pack=True)
    prepacked = [
        {
            "inputs": [7, 8, 1, 8, 4],
            "targets": [3, 1, 4, 1],
            "inputs_segment_ids": [1, 1, 1, 2, 2],
            "targets_segment_ids": [1, 1, 2, 2],
            "inputs_positions": [0, 1, 2, 0, 1],
            "targets_positions": [0, 1, 0, 1],
        }
    ]
    lengths = {feature: 8 if feature.startswith("inputs") else 6 for feature in prepacked[0]}
    add("prepacked", "PrePackedEncDecFeatureConverter", lengths, prepacked, pack=False)
    return jobs


def vocabulary_jobs() -> dict[str, dict]:
    texts = [*sentences(), *STRANGE_TEXTS]
    ids = [[], [1], [0, 0], [300, 1, 300], [300, 0, 300], [2, 3], [10**6, 100, 258, 259, 268], [195, 100, 206]]
    jobs = {}
    for name, folder, extra_ids in (
        ("t5", "t5_vocab", 0),
        ("t5_100", "t5_vocab", 100),
        ("mt5", "mt5_vocab", 0),
        ("umt5_300", "umt5_vocab", 300),
    ):
        path = str((SHARED / folder / "spiece.model").resolve())
        arguments = {"sentencepiece_model_file": path, "extra_ids": extra_ids}
        jobs[name] = {"class": "SentencePieceVocabulary", "arguments": arguments, "texts": texts, "ids": ids}
    t5 = jobs["t5"]["arguments"] | {"extra_ids": 5, "reverse_extra_ids": False}
    jobs["t5_forward"] = {"class": "SentencePieceVocabulary", "arguments": t5, "texts": texts, "ids": ids}
    for extra_ids in (0, 10):
        arguments = {"extra_ids": extra_ids}
        jobs[f"bytes_{extra_ids}"] = {"class": "ByteVocabulary", "arguments": arguments, "texts": texts, "ids": ids}
    return jobs


@functools.cache
def jobs() -> dict[str, dict[str, dict]]:
    return {"converters": converter_jobs(), "vocabularies": vocabulary_jobs() if SHARED.is_dir() else {}}


@functools.cache
def _results() -> dict[str, np.ndarray]:
    """seqio's answers to all jobs."""
    with np.load(reference_answers(_PROGRAM, jobs(), "results.npz")) as arrays:
        return dict(arrays)


def reference(kind: str, name: str) -> dict[str, np.ndarray]:
    """seqio's answer to one job; skips the test where there is no seqio."""
    start = f"{kind}/{name}/"
    return {key.removeprefix(start): value for key, value in _results().items() if key.startswith(start)}

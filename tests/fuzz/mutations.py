"""Turns a whole checkpoint into a hostile one, as a pure function of a random number generator.

`mutate` applies one to three mutations. They know the formats, so that what they change is reached: checksums are
repaired afterwards, lengths and checksums inside of files are kept true, and paths lead to files that are really there,
outside of the checkpoint.
"""

import random
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from t5x._runtime.errors import UserError
from tests.fuzz import array_mutations as arrays
from tests.fuzz import file_mutations as files
from tests.fuzz import vocabulary_mutations as vocabularies

# Changes something in a directory, given one outside of it that nothing may lead to; returns what it did.
Mutation = Callable[[random.Random, Path, Path], str]

_OURS: list[Mutation] = [
    *[files.change_own_json] * 3, vocabularies.change_vocabulary_json, vocabularies.hide_vocabulary,
    vocabularies.change_sentencepiece, vocabularies.change_tokenizer, *[arrays.change_database] * 2, arrays.break_nodes,
]  # fmt: skip
_NATIVE: list[Mutation] = [
    *[arrays.change_msgpack] * 2, arrays.change_zarr, files.change_json, arrays.claim_fill_values
]  # fmt: skip
_ZARR: list[Mutation] = [files.change_json, arrays.change_zarr, arrays.claim_fill_values]
_HUGGING_FACE: list[Mutation] = [files.change_json, *[arrays.change_header] * 2]

# What knows the files of a format.
STRUCTURED: dict[str, list[Mutation]] = {
    "t5x": _OURS,
    "t5x scanned": _OURS,
    "native": _NATIVE,
    "native scanned": _NATIVE,
    "Orbax OCDBT": [files.change_json, *[arrays.change_database] * 2, arrays.break_nodes],
    "Orbax zarr": _ZARR,
    "Orbax zarr3": _ZARR,
    "early Orbax": [arrays.change_msgpack, *_ZARR],
    "Mesh TensorFlow": [*[arrays.change_bundle] * 2, arrays.change_state_file],
    "Hugging Face": [*_HUGGING_FACE, *[vocabularies.change_sentencepiece] * 2],
    "Hugging Face, tokenizer.json": [*_HUGGING_FACE, *[vocabularies.change_tokenizer] * 2, arrays.rename_shards],
}
GENERIC: list[Mutation] = [
    files.flip_bytes, files.cut_off, files.append, files.remove, files.swap, files.duplicate, files.enlarge,
    *[files.replace_by_special] * 3, files.link_folder,
]  # fmt: skip


def mutate(format: str, directory: Path, outside: Path, rng: random.Random) -> list[str]:
    """Mutates the checkpoint in `directory`; returns what was done.

    Args:
      outside: a whole checkpoint of the same format that nothing in `directory` may lead to.
    """
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        chosen = rng.choice(STRUCTURED[format]) if rng.random() < 0.75 else rng.choice(GENERIC)
        try:
            done.append(chosen(rng, directory, outside))
        except (OSError, ValueError, LookupError, TypeError, RecursionError, DecodeError, UserError) as error:
            if not done:  # else an earlier mutation took away what this one needs
                raise
            done.append(f"{chosen.__name__}: nothing ({type(error).__name__})")
    if rng.random() < 0.9:
        files.repair(directory)
    return done

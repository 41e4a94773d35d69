"""Names of checkpoints: local paths, URLs, ids of the Hugging Face Hub and short names of Google's public checkpoints.

| name | meaning |
|---|---|
| `runs/demo` | a local path, if it exists; it takes precedence over the Hub |
| `google/flan-t5-small`, `owner/name@revision` | a model of the Hub, unless there is a local directory `owner` |
| `hf://owner/name@revision` | a model of the Hub in any case |
| `t5x:t5_1_1_small` | a checkpoint that was published with T5X, at gs://t5-data |
| `gs://bucket/run` | any other URL |

T5X_MIRROR (`t5x.files.remote.mirrored`) names local copies of remote directories, such as gs://t5-data.
"""

import os
import re

from t5x._runtime.errors import UserError, did_you_mean
from t5x.checkpoints import paths
from t5x.files.remote import is_remote, mirrored

_HUB_SCHEME = "hf://"
_HUB_MODEL = re.compile(r"(?P<id>[\w.-]{1,96}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]+))?")
_PREFIX = "t5x:"
_BUCKET = "gs://t5-data"
_SIZES = ("small", "base", "large", "xl", "xxl")
_T5_VOCABULARY = "cc_all.32000.100extra"
_MT5_VOCABULARY = "mc4.250000.100extra"
_UMT5_VOCABULARY = "umt5.256000"


def _public_checkpoints() -> dict[str, tuple[str, str]]:
    """Return {short name: (path below the bucket's pretrained_models/t5x, vocabulary)}."""
    steps = {"t5_small": 1000000, "t5_base": 999900, "t5_large": 1000700, "t5_3B": 1000000, "t5_11B": 1000000}
    for size, step in zip(_SIZES, (1198000, 1184000, 1164000, 1138000, 1114000), strict=True):
        steps |= {f"t5_1_1_{size}": 1000000, f"t5_1_1_lm100k_{size}": 1100000, f"flan_t5_{size}": step}
    checkpoints = {name: (f"{name}/checkpoint_{step}", _T5_VOCABULARY) for name, step in steps.items()}
    for size in _SIZES:
        checkpoints[f"mt5_{size}"] = (f"mt5_{size}/checkpoint_1000000", _MT5_VOCABULARY)
        checkpoints[f"mt5_lm_adapted_{size}"] = (f"mt5_lm_adapted/{size}/checkpoint_1100000", _MT5_VOCABULARY)
        checkpoints[f"byt5_{size}"] = (f"byt5_{size}/checkpoint_1000000", "bytes")
        if size != "large":
            checkpoints[f"umt5_{size}"] = (f"umt5/{size}/checkpoint_1000000", _UMT5_VOCABULARY)
    return checkpoints


PUBLIC_CHECKPOINTS = _public_checkpoints()

_HUB_MODELS = (
    *(f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")),
    *(f"google/{family}-{size}" for family in ("flan-t5", "t5-v1_1", "mt5", "byt5") for size in _SIZES),
    *(f"google/t5-{size}-lm-adapt" for size in _SIZES),
    *(f"google/umt5-{size}" for size in ("small", "base", "xl", "xxl")),
    *(f"castorini/monot5-{size}" for size in ("base-msmarco", "large-msmarco", "3b-msmarco", "base-msmarco-10k")),
    "allenai/unifiedqa-t5-small", "allenai/unifiedqa-t5-base", "google/flan-ul2", "bigscience/T0_3B",
)  # fmt: skip


def resolve(name: str | os.PathLike[str]) -> str:
    """Return the absolute local path or the URL of the checkpoint that a user named. Nothing is downloaded.

        resolve("google/flan-t5-small")     # 'hf://google/flan-t5-small'
        resolve("t5x:t5_1_1_small")         # 'gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000'

    Raises:
      UserError: it is a short name that does not exist.
    """
    name = os.fspath(name)
    if not name:
        raise UserError("The path of the checkpoint is empty. Pass a checkpoint, or the MODEL_DIR of a run.")
    if name.startswith(_PREFIX):
        name = _public(name)
    name = mirrored(name)
    if is_remote(name):
        return name
    path = paths.local_path(name)
    if _HUB_MODEL.fullmatch(name) and not path.exists() and not path.parent.exists():
        return _HUB_SCHEME + name
    return str(path)


def is_hub_url(path: str) -> bool:
    return path.startswith(_HUB_SCHEME)


def parse_hub_url(url: str) -> tuple[str, str | None]:
    """Return the id and the revision of a model on the Hub."""
    match = _HUB_MODEL.fullmatch(url.removeprefix(_HUB_SCHEME))
    if match is None:
        raise UserError(f"{url} does not name a model of the Hub. Write hf://owner/name or hf://owner/name@revision.")
    return match["id"], match["revision"]


def pinned_hub_url(url: str, directory: str) -> str:
    """Return the URL of exactly the commit that was stored in `directory`."""
    return f"{_HUB_SCHEME}{parse_hub_url(url)[0]}@{os.path.basename(directory)}"


def public_vocabulary(name: str) -> str | None:
    """Return the vocabulary of a public checkpoint, for `vocabulary_named`; None for any other checkpoint."""
    name = resolve(name)
    for path, vocabulary in PUBLIC_CHECKPOINTS.values():
        if f"{name}/".startswith(mirrored(f"{_BUCKET}/pretrained_models/t5x/{path}") + "/"):
            return vocabulary if vocabulary == "bytes" else f"{_BUCKET}/vocabs/{vocabulary}/sentencepiece.model"
    return None


def _public(name: str) -> str:
    short = name.removeprefix(_PREFIX)
    if short not in PUBLIC_CHECKPOINTS:
        near = (
            did_you_mean(short, {n: _PREFIX + n for n in PUBLIC_CHECKPOINTS})
            or f" Known are {', '.join(sorted(PUBLIC_CHECKPOINTS))}."
        )
        raise UserError(f"{name} is not a public T5X checkpoint.{near}")
    return f"{_BUCKET}/pretrained_models/t5x/{PUBLIC_CHECKPOINTS[short][0]}"


def suggestion(name: str) -> str:
    """Return " Did you mean …?" with names similar to that of a checkpoint that does not exist, or ""."""
    path = name.removeprefix(_HUB_SCHEME).partition("@")[0].rstrip("/")
    directory, last = os.path.split(path)
    known = {model.rpartition("/")[2]: model for model in _HUB_MODELS} | {n: _PREFIX + n for n in PUBLIC_CHECKPOINTS}
    if path == name.rstrip("/") and os.path.isdir(directory or "."):
        known |= {sibling: os.path.join(directory, sibling) for sibling in os.listdir(directory or ".")}
    return did_you_mean(last, {key: candidate for key, candidate in known.items() if candidate != path})

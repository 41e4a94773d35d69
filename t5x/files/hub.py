"""Models on the Hugging Face Hub: `hf://owner/name` and `hf://owner/name@revision`."""

import contextlib
import os
import re
from collections.abc import Iterator

from t5x._runtime.errors import UserError

SCHEME = "hf://"
MODEL_ID = r"[\w.-]{1,96}/[\w.-]{1,96}"
_URL = re.compile(rf"{SCHEME}(?P<id>{MODEL_ID})(?:@(?P<revision>[\w./-]+))?")
# Weights are read from safetensors only. Pickle files, which can run code, are never downloaded.
_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
    "model-*-of-*.safetensors", "spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip


def is_hub_url(path: str) -> bool:
    return path.startswith(SCHEME)


def download(url: str) -> str:
    """Return the local directory of a model on the Hub, in the cache of `huggingface_hub`.

    Its environment variables apply: HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME (the cache), HF_HUB_OFFLINE. Without a
    network, the cached copy is used.
    """
    from huggingface_hub import constants, snapshot_download

    model, revision = _parse(url)
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT  # may be set after huggingface_hub was imported
    with _explained(model, revision, endpoint):
        directory = snapshot_download(model, revision=revision, allow_patterns=list(_FILES), endpoint=endpoint)
    if not any(name.endswith(".safetensors") for name in os.listdir(directory)):
        raise UserError(
            f"{model} has no model.safetensors on the Hub. Its weights may be in pickle files, which are not read "
            f"because they can run code. Look for a safetensors conversion among the model's pull requests and pass "
            f"{model}@refs/pr/NUMBER, or, if you trust the model, save it again with transformers: "
            f"AutoModelForSeq2SeqLM.from_pretrained({model!r}).save_pretrained(DIRECTORY)."
        )
    return directory


def pinned(url: str, directory: str) -> str:
    """Return the URL of exactly the commit that `download` stored in `directory`."""
    return f"{SCHEME}{_parse(url)[0]}@{os.path.basename(directory)}"


def _parse(url: str) -> tuple[str, str | None]:
    match = _URL.fullmatch(url)
    if match is None:
        raise UserError(f"{url} does not name a model of the Hub. Write hf://owner/name or hf://owner/name@revision.")
    return match["id"], match["revision"]


@contextlib.contextmanager
def _explained(model: str, revision: str | None, endpoint: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into a UserError with the fix."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated: accept its conditions at {endpoint}/{model}, then run `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{model} has no revision {revision!r}: pass a branch, a tag or a full commit hash.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFound(
            f"{_not_local(model)}There is no model {model} at {endpoint}, or it is private. For a private model, run "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except (OSError, errors.HTTPError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk: errors of the network have none
            raise UserError(
                f"{model} could not be stored in {constants.HF_HUB_CACHE}: {error.strerror}. Set HF_HOME to a "
                "directory with enough space that you may write to."
            ) from error
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{_not_local(model)}The Hub's model {model} is not in the cache {constants.HF_HUB_CACHE} and could not be "
            f"downloaded from {endpoint} ({reason[0]}). Pass the path of a local checkpoint, check the network, or set "
            "HF_ENDPOINT to the URL of a mirror that you can reach."
        ) from error


def _not_local(model: str) -> str:
    """Return a sentence for users who meant a local path, which looks like a model id."""
    return "" if os.path.exists(model) else f"There is no local path {model}. "


class ModelNotFound(UserError):
    """The Hub has no model of this name."""

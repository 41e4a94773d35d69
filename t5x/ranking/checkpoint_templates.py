"""The template that a checkpoint was trained with: stored in it, or that of a known public ranker."""

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from t5x.checkpoints.formats import Source
from t5x.errors import UserError
from t5x.files.untrusted import MAX_JSON_BYTES, open_regular, parse_json
from t5x.ranking.templates import DUOT5, MONOT5, PRESETS, PairTemplate, Template, from_fields

# The published mT5 of 3B and 13B parameters learned `false`, which is two pieces in mT5, by its first one.
_MT5_LARGE = dataclasses.replace(MONOT5, relevant="▁true", irrelevant="▁")
_PUBLIC: tuple[tuple[str, Template, str], ...] = (
    (r"duot5", DUOT5, "duoT5's"),
    (r"monot5", MONOT5, "monoT5's"),
    (r"monoptt5", PRESETS["monoptt5"], "monoPTT5's"),
    (r"ptt5.*(msmarco|mmarco)", PRESETS["ptt5"], "PTT5's"),
    (r"mt5-(3b|13b)-.*mmarco", _MT5_LARGE, "the large mT5's"),
    (r"mt5.*(msmarco|mmarco)", PRESETS["mt5"], "mT5's"),
)


def template_of(source: Source, model: Any, *, pairwise: bool = False, has_text: bool = False) -> tuple[Template, str]:
    """Return the template of a checkpoint and the reason for the choice.

    Args:
      model: the checkpoint's model; our ranking models have a `template`.
      pairwise: return a template for two documents, as in duoT5.
      has_text: the user passes a template text, so only labels and length are taken from the checkpoint's template.
    """
    kind = PairTemplate if pairwise else Template
    wrong = UserError(
        f"{source.path} is a pairwise ranker. Pass it as --pairwise, together with a pointwise --model."
        if not pairwise
        else f"--pairwise {source.path} is a pointwise ranker. Pass one that compares two passages, such as duoT5."
    )
    own = getattr(model, "template", None)
    if source.template is not None:
        own = from_fields(source.template, source.path)
    candidates = [(own, "the checkpoint's own")] if isinstance(own, Template) else _by_name(source.path)
    for template, why in candidates:
        if type(template) is kind:
            return template, why
        if not has_text:
            raise wrong
    if pairwise:
        return DUOT5, "duoT5's, the default"
    return MONOT5, "monoT5's, the default"


def with_changes(
    template: Template, why: str, *, text: str | None, labels: str | None, max_length: int | None
) -> tuple[Template, str]:
    """Return the template with the user's settings applied, and the reasons."""
    changes: dict[str, Any] = {}
    if text is not None:
        if (preset := PRESETS.get(text)) is not None:
            template, why = preset, f"--template {text}"
        else:
            changes["text"], why = text, f"--template; the rest {why}"
    if labels is not None:
        words = labels.split(",")
        if not 1 <= len(words) <= 2 or not all(words):
            raise UserError(
                f"--labels is {labels!r}: it must be two words, such as true,false, or one whose logit is the score."
            )
        changes |= {"relevant": words[0], "irrelevant": words[1] if len(words) > 1 else None}
        why += "; --labels"
    if max_length is not None:
        changes["max_length"] = max_length
        why += "; --max_length"
    return dataclasses.replace(template, **changes), why


def _by_name(path: str) -> Iterator[tuple[Template, str]]:
    for name in _names(path):
        for pattern, template, whose in _PUBLIC:
            if re.search(pattern, name.lower()):
                yield template, f"{whose}, as the checkpoint is {name}"


def _names(path: str) -> Iterator[str]:
    """Yield the names of a Hugging Face directory: in its config.json, on disk, and in the Hugging Face cache."""
    try:
        with open_regular(os.path.join(path, "config.json")) as file:
            stated = parse_json(file.read(MAX_JSON_BYTES + 1)).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        stated = None
    if isinstance(stated, str):
        yield stated
    parts = os.path.abspath(path).split(os.sep)
    yield parts[-1]
    for part in parts:
        if part.startswith("models--"):
            yield part.removeprefix("models--").replace("--", "/")

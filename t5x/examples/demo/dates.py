"""A small task that needs no download: dates as people write them, to ISO 8601.

    >>> Dates("validation")[1]
    {'inputs': 'the ninth of October 1960', 'targets': '1960-10-09'}

English, German and French; month names and abbreviations, ordinals in digits and in words, correct weekdays, and
realistic noise (lower and upper case, missing commas, accents and dots, double spaces). Every input is unambiguous:

- All-numeric dates are year first (`1997/3/3`, `1997-03-03`) or German (`3.3.1997`, day first). Dates such as
  `3/4/1997`, which means different days in the US and in Europe, never occur.
- In all other forms the month is a word and the year comes last. Two-digit years 00-39 mean 2000-2039 and 40-99 mean
  1940-1999; they are used for these years only.

Dates run from 1900 to 2039. An example is a pure function of (seed, split, index). The dates themselves are split: a
date of the validation or test split never occurs in training, in any form.

Importing this module registers the task `dates` (in gin: `import t5x.examples.demo.dates`).
"""

import datetime
import functools
import hashlib
import operator
import random
from collections.abc import Sequence
from typing import TypeVar, overload

from t5x._runtime.errors import UserError

TASK_NAME = "dates"
FIRST_YEAR, LAST_YEAR = 1900, 2039
MAX_INPUT_BYTES = 31  # with EOS: an inputs length of 32
TARGET_BYTES = 10  # with EOS: a targets length of 11

SPLIT_SIZES = {"train": 200_000, "validation": 500, "test": 500}

# Twelve months per language; `|` separates the usual spelling from those without accents.
_MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März|Maerz April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février|fevrier mars avril mai juin juillet août|aout septembre octobre novembre décembre|decembre",
}
# Abbreviations, written with or without a dot; `-` where the language has none.
_SHORT_MONTHS = {
    "en": "Jan Feb Mar Apr - Jun Jul Aug Sept|Sep Oct Nov Dec",
    "de": "Jan Feb Mrz Apr - Jun Jul Aug Sept|Sep Okt Nov Dez",
    "fr": "janv févr|fevr - avr - - juil - sept oct nov déc|dec",
}
_WEEKDAYS = {
    "en": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "de": "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
    "fr": "lundi mardi mercredi jeudi vendredi samedi dimanche",
}
_SHORT_WEEKDAYS = {"en": "Mon Tue Wed Thu Fri Sat Sun", "de": "Mo Di Mi Do Fr Sa So"}
_ENGLISH_ORDINALS = """
    first second third fourth fifth sixth seventh eighth ninth tenth
    eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth
    twenty-first twenty-second twenty-third twenty-fourth twenty-fifth
    twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"""
_GERMAN_ORDINAL_STEMS = """
    erst zweit dritt viert fünft sechst siebt acht neunt zehnt
    elft zwölft dreizehnt vierzehnt fünfzehnt sechzehnt siebzehnt achtzehnt neunzehnt zwanzigst
    einundzwanzigst zweiundzwanzigst dreiundzwanzigst vierundzwanzigst fünfundzwanzigst
    sechsundzwanzigst siebenundzwanzigst achtundzwanzigst neunundzwanzigst dreißigst einunddreißigst"""

# (weight, language, form). {year} may have two digits, {year4} never.
FORMS = (
    (2, "en", "{month} {day}, {year}"),
    (2, "en", "{month} {day_th}, {year}"),
    (2, "en", "{day} {month} {year}"),
    (1, "en", "the {day_th} of {month} {year}"),
    (3, "en", "the {day_word} of {month} {year}"),
    (1, "en", "{month} the {day_word}, {year}"),
    (2, "en", "{weekday}, {day} {month} {year}"),
    (2, "en", "{weekday}, {month} {day}, {year}"),
    (3, "de", "{day}. {month} {year}"),
    (1, "de", "am {day}. {month} {year}"),
    (3, "de", "am {day_word}en {month} {year}"),
    (1, "de", "der {day_word}e {month} {year}"),
    (2, "de", "{weekday}, {day}. {month} {year}"),
    (1, "de", "{weekday}, den {day}. {month} {year}"),
    (3, "de", "{number_day}.{number_month}.{year}"),
    (3, "fr", "{day_er} {month} {year}"),
    (2, "fr", "le {day_er} {month} {year}"),
    (2, "fr", "{weekday} {day_er} {month} {year}"),
    (1, "fr", "le {weekday} {day_er} {month} {year}"),
    (1, "fr", "{month} {day}, {year}"),
    (2, "iso", "{year4}/{number_month}/{number_day}"),
    (1, "iso", "{year4}-{number_month}-{number_day}"),
)
_FORM_OF_TICKET = [(language, form) for weight, language, form in FORMS for _ in range(weight)]

_T = TypeVar("_T")


class Chance:
    """Seeded random choices. Uses only `Random.random`, whose sequence is stable across Python releases."""

    def __init__(self, seed: str):
        self._random = random.Random(seed).random

    def one_of(self, options: Sequence[_T]) -> _T:
        return options[int(self._random() * len(options))]

    def happens(self, probability: float) -> bool:
        return self._random() < probability


def split_of(date: datetime.date) -> str:
    """Return the only split that `date` occurs in: one date in 20 is for validation, one in 20 for test."""
    digest = hashlib.sha256(date.isoformat().encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 20
    return {0: "validation", 1: "test"}.get(bucket, "train")


@functools.cache
def dates_of(split: str) -> tuple[datetime.date, ...]:
    """Return all dates of a split, in calendar order."""
    first = datetime.date(FIRST_YEAR, 1, 1).toordinal()
    last = datetime.date(LAST_YEAR, 12, 31).toordinal()
    dates = map(datetime.date.fromordinal, range(first, last + 1))
    return tuple(date for date in dates if split_of(date) == split)


def _month(date: datetime.date, language: str, chance: Chance) -> str:
    short = _SHORT_MONTHS[language].split()[date.month - 1]
    if short != "-" and chance.happens(0.3):
        return chance.one_of(short.split("|")) + chance.one_of(("", "."))
    usual, *unaccented = _MONTHS[language].split()[date.month - 1].split("|")
    return chance.one_of(unaccented) if unaccented and chance.happens(0.25) else usual


def _weekday(date: datetime.date, language: str, chance: Chance) -> str:
    names = _SHORT_WEEKDAYS if language in _SHORT_WEEKDAYS and chance.happens(0.4) else _WEEKDAYS
    return names[language].split()[date.weekday()]


def _year(date: datetime.date, language: str, chance: Chance) -> str:
    if 1940 <= date.year <= 2039 and chance.happens(0.3):
        apostrophe = "'" if language == "en" and chance.happens(0.5) else ""
        return f"{apostrophe}{date.year % 100:02}"
    return str(date.year)


def _english_ordinal(day: int) -> str:
    ending = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def _fields(date: datetime.date, language: str, chance: Chance) -> dict[str, str]:
    """Return every field that a form of this language may use."""
    width = chance.one_of((1, 2))
    fields = {
        "day": str(date.day),
        "number_day": f"{date.day:0{width}}",
        "number_month": f"{date.month:0{width}}",
        "year": _year(date, language, chance),
        "year4": str(date.year),
    }
    if language != "iso":
        fields["month"] = _month(date, language, chance)
        fields["weekday"] = _weekday(date, language, chance)
    if language == "en":
        fields |= {"day_th": _english_ordinal(date.day), "day_word": _ENGLISH_ORDINALS.split()[date.day - 1]}
    elif language == "de":
        fields["day_word"] = _GERMAN_ORDINAL_STEMS.split()[date.day - 1]
    elif language == "fr":
        fields["day_er"] = "1er" if date.day == 1 else str(date.day)
    return fields


def _mess(text: str, chance: Chance) -> str:
    """Change case, commas and spaces at random, as people do when they type dates."""
    if chance.happens(0.2):
        text = text.replace(",", "")
    if chance.happens(0.2):
        text = text.lower()
    elif chance.happens(0.1):
        text = text.upper()
    if " " in text and chance.happens(0.1):
        space = chance.one_of([i for i, character in enumerate(text) if character == " "])
        text = text[:space] + " " + text[space:]
    return text


def write(date: datetime.date, chance: Chance) -> str:
    """Return `date` in one of the many ways to write it, in at most MAX_INPUT_BYTES."""
    while True:
        language, form = chance.one_of(_FORM_OF_TICKET)
        text = _mess(form.format(**_fields(date, language, chance)), chance)
        if len(text.encode()) <= MAX_INPUT_BYTES:
            return text


class Dates(Sequence):
    """The examples of one split: `{"inputs": written date, "targets": ISO date}`, each computed on access.

    Args:
      split: "train", "validation" or "test".
      seed: a different seed gives different examples of the same dates.
    """

    def __init__(self, split: str, seed: int = 0):
        if split not in SPLIT_SIZES:
            raise UserError(f"The task dates has no split {split!r} (splits: {', '.join(SPLIT_SIZES)}).")
        self.split = split
        self.seed = seed

    def __len__(self) -> int:
        return SPLIT_SIZES[self.split]

    @overload
    def __getitem__(self, index: int) -> dict[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, str]]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[operator.index(index)]  # also negative ones; raises IndexError
        chance = Chance(f"{self.seed}/{self.split}/{index}")
        date = chance.one_of(dates_of(self.split))
        return {"inputs": write(date, chance), "targets": date.isoformat()}


def register() -> None:
    """Add the task `dates` to the registry, unless it is there."""
    from t5x import data
    from t5x.metrics.answers import exact_match

    if TASK_NAME in data.TaskRegistry.names():
        return
    vocabulary = data.ByteVocabulary()
    data.TaskRegistry.add(
        TASK_NAME,
        source=data.FunctionDataSource(Dates, splits=tuple(SPLIT_SIZES)),
        preprocessors=[data.preprocessors.tokenize, data.preprocessors.append_eos],
        output_features={"inputs": data.Feature(vocabulary), "targets": data.Feature(vocabulary)},
        metric_fns=[exact_match],
    )


register()

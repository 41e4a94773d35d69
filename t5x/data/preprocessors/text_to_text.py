"""T5's text-to-text tasks: well-known datasets in the formats that the published models were trained on."""

import csv
import re
import string
from collections.abc import Sequence
from typing import Any

from t5x._runtime.errors import UserError

_NAMES = """
aa Afar, ab Abkhazian, af Afrikaans, ak Akan, am Amharic, an Aragonese, ar Arabic, as Assamese, az Azerbaijani,
ba Bashkir, be Belarusian, bg Bulgarian, bm Bambara, bn Bangla, bo Tibetan, br Breton, bs Bosnian, ca Catalan,
ce Chechen, co Corsican, cs Czech, cu Church Slavic, cv Chuvash, cy Welsh, da Danish, de German, dv Divehi,
dz Dzongkha, ee Ewe, el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, ff Fula,
fi Finnish, fo Faroese, fr French, fy Western Frisian, ga Irish, gd Scottish Gaelic, gl Galician, gn Guarani,
gu Gujarati, gv Manx, ha Hausa, he Hebrew, hi Hindi, hr Croatian, ht Haitian Creole, hu Hungarian, hy Armenian,
ia Interlingua, id Indonesian, ie Interlingue, ig Igbo, ii Sichuan Yi, io Ido, is Icelandic, it Italian,
iu Inuktitut, ja Japanese, jv Javanese, ka Georgian, ki Kikuyu, kk Kazakh, kl Kalaallisut, km Khmer, kn Kannada,
ko Korean, ks Kashmiri, ku Kurdish, kw Cornish, ky Kyrgyz, la Latin, lb Luxembourgish, lg Ganda, ln Lingala, lo Lao,
lt Lithuanian, lu Luba-Katanga, lv Latvian, mg Malagasy, mi Māori, mk Macedonian, ml Malayalam, mn Mongolian,
mr Marathi, ms Malay, mt Maltese, my Burmese, nb Norwegian Bokmål, nd North Ndebele, ne Nepali, nl Dutch,
nn Norwegian Nynorsk, no Norwegian, nr South Ndebele, nv Navajo, ny Nyanja, oc Occitan, om Oromo, or Odia,
os Ossetic, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, qu Quechua, rm Romansh, rn Rundi, ro Romanian,
ru Russian, rw Kinyarwanda, sa Sanskrit, sc Sardinian, sd Sindhi, se Northern Sami, sg Sango, si Sinhala, sk Slovak,
sl Slovenian, sn Shona, so Somali, sq Albanian, sr Serbian, ss Swati, st Southern Sotho, su Sundanese, sv Swedish,
sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tn Tswana, to Tongan, tr Turkish,
ts Tsonga, tt Tatar, ug Uyghur, uk Ukrainian, ur Urdu, uz Uzbek, ve Venda, vi Vietnamese, vo Volapük, wa Walloon,
wo Wolof, xh Xhosa, yi Yiddish, yo Yoruba, za Zhuang, zh Chinese, zu Zulu
"""
_BY_CODE = dict(entry.strip().split(" ", 1) for entry in _NAMES.split(","))


def language_name(code: str) -> str:
    """Return the English name of the language that the first two letters of `code` stand for.

    >>> language_name("de"), language_name("zh-cn")
    ('German', 'Chinese')
    """
    name = _BY_CODE.get(code[:2])
    if name is None:
        raise UserError(f"{code!r} does not begin with the two-letter code of a language that is known, such as 'de'.")
    return name


Example = dict[str, Any]

_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_SPACES = re.compile(r"[ \t\n\f\r]+")
_UNKNOWN_LABEL = "<unk>"


def translate(example: Example, source_language: str, target_language: str) -> Example:
    """Format a translation pair, in fields named by language codes.

    >>> translate({"de": "Das ist gut.", "en": "That is good."}, "de", "en")
    {'inputs': 'translate German to English: Das ist gut.', 'targets': 'That is good.'}
    """
    task = f"translate {language_name(source_language)} to {language_name(target_language)}: "
    return {"inputs": task + _text(example, source_language), "targets": _text(example, target_language)}


def summarize(example: Example, article_key: str, summary_key: str) -> Example:
    """Format an article and its summary.

    >>> summarize({"article": "A long story.", "highlights": "Short."}, "article", "highlights")
    {'inputs': 'summarize: A long story.', 'targets': 'Short.'}
    """
    return {"inputs": f"summarize: {_text(example, article_key)}", "targets": _text(example, summary_key)}


def squad(example: Example, include_context: bool = True) -> Example:
    """Format a SQuAD question: {"id", "context", "question", "answers": {"text": [answer, …]}}.

    Every punctuation mark is surrounded by spaces, as in T5's training data. The first answer is the target.

    Args:
      include_context: False omits the context from the inputs and uses another prompt.
    """
    answers = [_spaced(answer) for answer in example["answers"]["text"]]
    if not answers:
        raise UserError("the question has no answer. Leave such examples out before squad.")
    question, context = (_spaced(_text(example, key)) for key in ("question", "context"))
    prompt = f"question: {question} context: {context}" if include_context else f"squad trivia question: {question}"
    return {
        "inputs": _SPACES.sub(" ", prompt),
        "targets": answers[0],
        "id": example["id"],
        "context": context,
        "question": question,
        "answers": answers,
    }


def glue(
    example: Example,
    benchmark_name: str,
    label_names: Sequence[str],
    feature_names: Sequence[str] | None = None,
    id_key: str | None = "idx",
) -> Example:
    """Format a sentence or a pair of sentences with a label, as in GLUE and SuperGLUE.

    >>> example = {"sentence1": "It rains.", "sentence2": "It is wet.", "label": 1, "idx": 7}
    >>> glue(example, "mrpc", ["not_equivalent", "equivalent"])
    {'idx': 7, 'inputs': 'mrpc sentence1: It rains. sentence2: It is wet.', 'targets': 'equivalent'}

    Args:
      benchmark_name: first word of the inputs. "multirc" also removes HTML tags, and its `idx` has three parts.
      label_names: target for each label from 0; a label of -1 (none) becomes "<unk>".
      feature_names: fields of the inputs, in this order; None uses all but `label` and `idx`, sorted.
      id_key: field to keep as `idx`; None keeps none.
    """
    names = feature_names or sorted(set(example) - {"label", "idx"})
    inputs = " ".join([benchmark_name, *(f"{name}: {_text(example, name)}" for name in names)])
    index = {}
    if benchmark_name == "multirc":
        inputs = re.sub("</?b>", "", inputs.replace("<br>", " "))
        index = {f"idx/{part}": example["idx"][part] for part in ("paragraph", "question", "answer")}
    elif id_key:
        index = {"idx": example[id_key]}
    return index | {"inputs": inputs, "targets": _label_name(example["label"], label_names)}


def stsb(example: Example) -> Example:
    """Format a sentence pair of GLUE's STS-B, with the similarity rounded to the nearest 0.2.

    >>> stsb({"sentence1": "A man sings.", "sentence2": "A man eats.", "label": 1.75, "idx": 7})
    {'inputs': 'stsb sentence1: A man sings. sentence2: A man eats.', 'targets': '1.8', 'idx': 7}
    """
    first, second = (_text(example, key) for key in ("sentence1", "sentence2"))
    return {
        "inputs": f"stsb sentence1: {first} sentence2: {second}",
        "targets": f"{round(_number(example, 'label') * 5) / 5:.1f}",
        "idx": example["idx"],
    }


def monot5(
    example: Example,
    query_key: str = "query",
    passage_key: str = "passage",
    label_key: str = "label",
    true_word: str = "true",
    false_word: str = "false",
) -> Example:
    """Format a query and a passage for monoT5; a label above 0 is relevant.

    >>> monot5({"query": "capital of France", "passage": "Paris is its capital.", "label": 1})
    {'inputs': 'Query: capital of France Document: Paris is its capital. Relevant:', 'targets': 'true'}
    """
    query, passage = _text(example, query_key), _text(example, passage_key)
    return {
        "inputs": f"Query: {query} Document: {passage} Relevant:",
        "targets": true_word if _number(example, label_key) > 0 else false_word,
    }


def parse_tsv(
    example: Example,
    field_names: Sequence[str] | None = None,
    field_delim: str = "\t",
    field_columns: Sequence[int] | None = None,
    text_key: str = "text",
) -> Example:
    r"""Split a line of text into fields; quotation marks have no special meaning.

    >>> parse_tsv({"text": "7\tHello\tHallo"}, ["en", "de"], field_columns=[1, 2])
    {'en': 'Hello', 'de': 'Hallo'}

    Args:
      field_names: names of the fields; "inputs" and "targets" by default.
      field_delim: separator of fields.
      field_columns: column of each field, from 0; the first columns by default.
      text_key: field of the example that has the line.
    """
    names = field_names or ["inputs", "targets"]
    columns = field_columns or range(len(names))
    fields = _text(example, text_key).split(field_delim)
    if max(columns) >= len(fields):
        raise UserError(f"the line has {len(fields)} field(s), but field {max(columns) + 1} is asked for.")
    return {name: fields[column] for name, column in zip(names, columns, strict=True)}


def preprocess_tsv(
    example: Example,
    field_delim: str = "\t",
    num_fields: int = 2,
    inputs_format: str = "{0}",
    targets_format: str = "{1}",
    field_names: Sequence[str] | None = None,
    use_quote_delim: bool = False,
    text_key: str = "text",
) -> Example:
    """Make inputs and targets from the fields of a line of text.

    >>> line = {"text": "6,7,42"}
    >>> preprocess_tsv(line, ",", 3, "numerator: {2} denominator: {1}", "quotient: {0}")
    {'inputs': 'numerator: 42 denominator: 7', 'targets': 'quotient: 6'}

    Args:
      field_delim: separator of fields.
      num_fields: number of fields per line; ignored with `field_names`.
      inputs_format, targets_format: text with the numbers (from 0) or, with `field_names`, the names of fields in
        braces.
      field_names: names of all fields of a line.
      use_quote_delim: allow the delimiter inside a field in double quotes.
      text_key: field of the example that has the line.
    """
    line = _text(example, text_key)
    fields = next(csv.reader([line], delimiter=field_delim)) if use_quote_delim else line.split(field_delim)
    names = field_names or [str(number) for number in range(num_fields)]
    if len(fields) != len(names):
        raise UserError(f"the line has {len(fields)} field(s) where {len(names)} are expected.")
    values = dict(zip(names, fields, strict=True))
    placeholder = re.compile("{(" + ("|".join(map(re.escape, names)) if field_names else r"\d+") + ")}")

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UserError(
                f"the format asks for field {match[0]} where num_fields is {num_fields}; they count from 0."
            )
        return values[match[1]]

    return {"inputs": placeholder.sub(value, inputs_format), "targets": placeholder.sub(value, targets_format)}


def lower_text(example: Example, key: str = "text") -> Example:
    """Lower-case a field."""
    return example | {key: _text(example, key).lower()}


def filter_by_string_length(
    example: Example, feature_key: str = "targets", min_length: int = 1, max_length: int = 1_000_000
) -> Example | None:
    """Drop an example whose text has fewer or more UTF-8 bytes than these limits."""
    return example if min_length <= len(_text(example, feature_key).encode()) <= max_length else None


def _text(example: Example, key: str) -> str:
    value = example[key]
    if not isinstance(value, str):
        raise UserError(f"the field {key!r} is not text but {str(value)[:60]!r}.")
    return value


def _number(example: Example, key: str) -> float:
    try:
        return float(example[key])
    except (TypeError, ValueError):
        raise UserError(f"the field {key!r} is not a number but {str(example[key])[:60]!r}.") from None


def _label_name(label: Any, names: Sequence[str]) -> str:
    number = _number({"label": label}, "label")
    if number == -1:
        return _UNKNOWN_LABEL
    if not number.is_integer() or not 0 <= number < len(names):
        raise UserError(f"the label {label!r} is not one of 0 to {len(names) - 1} ({', '.join(names)}), nor -1.")
    return names[int(number)]


def _spaced(text: str) -> str:
    return _SPACES.sub(" ", _PUNCTUATION.sub(r" \1 ", text))

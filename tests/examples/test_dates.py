import datetime
import functools
import re
import subprocess
import sys
from itertools import islice

import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.examples.demo import dates
from t5x.examples.demo.dates import Dates, dates_of, split_of

SAMPLE = 6000


@functools.cache
def examples(split, count=SAMPLE, seed=0):
    return list(islice(Dates(split, seed), count))


def date_of(example):
    return datetime.date.fromisoformat(example["targets"])


def test_examples_have_the_promised_shape():
    for split, size in {"train": 200_000, "validation": 500, "test": 500}.items():
        assert len(Dates(split)) == size
        for example in examples(split):
            assert set(example) == {"inputs", "targets"}
            assert 0 < len(example["inputs"].encode()) <= dates.MAX_INPUT_BYTES
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", example["targets"])
            assert 1900 <= date_of(example).year <= 2039


def test_an_example_depends_on_seed_split_and_index_only():
    train = Dates("train")
    backwards = [train[i] for i in reversed(range(200))]
    assert backwards[::-1] == examples("train", 200)
    assert examples("train", 200) != examples("train", 200, seed=1)
    assert train[-1] == train[len(train) - 1]


def test_examples_are_the_same_in_another_process():
    """No dependence on hash randomisation: a resumed or distributed run sees the same data."""
    program = "from t5x.examples.demo.dates import Dates; d = Dates('train', 3); print([d[i] for i in range(50)])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(examples("train", 50, seed=3))


def test_the_data_of_this_release_stays_what_it_is():
    """A change here changes every published number of the demo: make it knowingly."""
    assert examples("validation", 3) == [
        {"inputs": "1967/07/29", "targets": "1967-07-29"},
        {"inputs": "the ninth of October 1960", "targets": "1960-10-09"},
        {"inputs": "9 août 1918", "targets": "1918-08-09"},
    ]


def test_no_date_of_a_held_out_split_is_trained_on_whatever_the_seed():
    trained = {date_of(example) for seed in (0, 1) for example in examples("train", seed=seed)}
    held_out = {date_of(example) for split in ("validation", "test") for example in examples(split, seed=5)}
    assert not trained & held_out
    assert {split_of(date) for date in trained} == {"train"}
    every_day = (datetime.date(2040, 1, 1) - datetime.date(1900, 1, 1)).days
    assert sum(len(dates_of(split)) for split in dates.SPLIT_SIZES) == every_day
    assert all(len(dates_of(split)) > every_day // 25 for split in dates.SPLIT_SIZES)


def test_every_written_date_has_one_reading():
    readings = {}
    for example in examples("train", 20_000):
        readings.setdefault(example["inputs"].strip().lower(), set()).add(example["targets"])
    assert [text for text, targets in readings.items() if len(targets) > 1] == []


def test_two_digit_years_follow_the_pivot_and_slashes_put_the_year_first():
    pivoted = 0
    for example in examples("train"):
        text, date = example["inputs"], date_of(example)
        if "/" in text:
            assert re.match(r"\d{4}/", text)
        last = re.findall(r"\d+", text)[-1]
        if not re.match(r"\d{4}[/-]", text):
            year = int(last)
            if len(last) == 2:
                pivoted += 1
                year += 2000 if year <= 39 else 1900
            assert year == date.year, example
    assert pivoted > SAMPLE // 10


def test_weekdays_are_true():
    names = {"monday": 0, "dienstag": 1, "mercredi": 2, "thu": 3, "sat": 5, "so": 6, "dimanche": 6}
    seen = set()
    for example in examples("train", 20_000):
        for word in re.findall(r"\w+", example["inputs"].lower()):
            if word in names:
                seen.add(word)
                assert date_of(example).weekday() == names[word], example
    assert seen == set(names)


@pytest.mark.parametrize(
    ("pattern", "iso"),
    [
        (r"the third of march '?97", "1997-03-03"),
        (r"3\. märz 1997", "1997-03-03"),
        (r"(le )?1er (févr|fevr)\.? 1999", "1999-02-01"),
        (r"am dritten märz 1997", "1997-03-03"),
        (r"1997/0?3/0?3", "1997-03-03"),
        (r"0?3\.0?3\.(19)?97", "1997-03-03"),
        (r"monday,? (3 march|march 3,?) 1997", "1997-03-03"),
        (r"the thirty-first of may '?99", "1999-05-31"),
        (r"am einunddrei(ß|ss)igsten okt\.? 03", "2003-10-31"),
        (r"march 22nd,? 2003", "2003-03-22"),
    ],
)
def test_the_forms_people_write_occur(pattern, iso):
    date = datetime.date.fromisoformat(iso)
    written = {dates.write(date, dates.Chance(str(i))).lower() for i in range(3000)}
    assert any(re.fullmatch(pattern, text) for text in written)


def test_edges():
    assert Dates("validation")[498:] == [Dates("validation")[498], Dates("validation")[499]]
    with pytest.raises(IndexError):
        Dates("validation")[500]
    with pytest.raises(UserError, match=r"no split 'dev'.*train, validation, test"):
        Dates("dev")


def test_importing_the_module_registers_the_task():
    task = data.get_mixture_or_task("dates")
    assert task.splits == ("train", "validation", "test")
    lengths = {"inputs": dates.MAX_INPUT_BYTES + 1, "targets": dates.TARGET_BYTES + 1}
    cfg = data.DatasetConfig(task, lengths, "validation", batch_size=500, shuffle=False, seed=0)
    batches = data.eval_batches(cfg, feature_converter=data.EncDecFeatureConverter())
    ((batch, mask, examples),) = batches
    assert mask.all() and len(examples) == 500
    assert (batch["decoder_target_tokens"][:, -1] == 1).all()
    decode = data.ByteVocabulary().decode
    assert decode(batch["encoder_input_tokens"][1]) == examples[1]["inputs_pretokenized"] == "the ninth of October 1960"
    assert task.metric_fns[0](["1997-03-03"], ["1997-03-03"]) == {"exact_match": 100.0}
    dates.register()
    assert data.get_mixture_or_task("dates") is task

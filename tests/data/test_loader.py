import json
import logging
import threading

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data import preprocessors

from .conftest import byte_features, make_task

LENGTHS = {"inputs": 4, "targets": 4}
CONVERTER = data.EncDecFeatureConverter


def config(task, **changes):
    arguments = {"task_feature_lengths": LENGTHS, "split": "train", "batch_size": 4, "shuffle": True, "seed": 0}
    return data.DatasetConfig(task, **(arguments | changes))


def numbered(count):
    return [{"inputs": str(i), "targets": str(i)} for i in range(count)]


def train(task, **changes):
    return data.train_loader(config(task, **changes), feature_converter=CONVERTER())


def test_batches_have_the_models_features():
    with train(make_task(numbered(9))) as loader:
        batch = next(iter(loader))
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == dict.fromkeys(
        ["encoder_input_tokens", "decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights"],
        ((4, 4), "int32"),
    )
    np.testing.assert_array_equal(batch["encoder_input_tokens"], batch["decoder_target_tokens"])


def test_the_state_ignores_prefetched_batches():
    with train(make_task(numbered(50))) as loader:
        next(loader)
        next(loader)
        threading.Event().wait(0.05)  # lets the thread run ahead; the outcome does not depend on it
        state = loader.state()
        following = next(loader)
        assert state["batches"] == 2
        loader.restore(state)
        assert loader.state() == state
        np.testing.assert_array_equal(next(loader)["encoder_input_tokens"], following["encoder_input_tokens"])


def test_a_closed_loader_resumes():
    task = make_task(numbered(50))
    with train(task) as loader:
        expected = [next(loader)["encoder_input_tokens"] for _ in range(4)]
    loader = train(task)
    got = []
    for _ in range(4):
        got.append(next(loader)["encoder_input_tokens"])
        loader.close()
    np.testing.assert_array_equal(got, expected)


def test_threads_end_with_their_loaders():
    def running():
        return sum(thread.name == "t5x-data" for thread in threading.enumerate())

    before = running()
    loader = train(make_task(numbered(50)))
    next(loader)
    assert running() == before + 1
    loader.close()
    assert running() == before
    next(loader)
    del loader
    assert running() == before


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed is 1, not 0"),
        ({"shuffle": False}, "shuffle is False, not True"),
        ({"split": "test"}, "split is 'test', not 'train'"),
    ],
)
def test_a_state_of_other_data_is_refused(changes, difference):
    source = data.FunctionDataSource(lambda split: numbered(9), splits=("train", "test"))
    task = data.Task("numbers", source, byte_features(), [preprocessors.tokenize])
    with train(task) as saved, train(task, **changes) as other, pytest.raises(UserError, match=difference):
        other.restore(saved.state())


def drop_thirds(example):
    return None if int(example["inputs"]) % 3 == 0 else example


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("new_size", [2, 3, 8])
@pytest.mark.parametrize("extra", [[], [drop_thirds]])
def test_another_batch_size_resumes_after_the_examples_read(new_size, extra, pack):
    task = make_task(numbered(400), preprocessors=[*extra, preprocessors.tokenize])

    def loader(size):
        cfg = config(task, pack=pack, batch_size=size, task_feature_lengths={"inputs": 11, "targets": 11})
        return data.train_loader(cfg, feature_converter=CONVERTER(pack=pack))

    def texts(loader, batches):
        read = []
        for _ in range(batches):
            batch = next(loader)
            segments = batch.get("encoder_segment_ids", batch["encoder_input_tokens"] > 0)
            for row, ids in zip(batch["encoder_input_tokens"], segments, strict=True):
                read += [bytes(row[ids == i].astype(np.uint8) - 3) for i in range(1, ids.max() + 1)]
        return read

    with loader(4) as saved:
        before = texts(saved, 5)
        state = saved.state()
    with loader(new_size) as other:
        other.restore(state)
        after = texts(other, 40 // new_size)
    assert before and after and len({*before, *after}) == len(before) + len(after)  # all of it is in the first epoch


def test_a_state_of_another_task_or_of_changed_data_is_refused():
    state = train(make_task(numbered(9))).state()
    with pytest.raises(UserError, match="task is 'other', not 'task'"):
        train(make_task(numbered(9), name="other")).restore(state)
    with pytest.raises(UserError, match="num_examples is 10, not 9"):
        train(make_task(numbered(10))).restore(state)


def test_a_state_of_too_few_rows_is_refused():
    task = make_task(numbered(9))
    half = data.train_loader(config(task), feature_converter=CONVERTER(), rows=range(2))
    with pytest.raises(UserError, match=r"row 2 .* 1 more.*merge_states"):
        train(task).restore(half.state())


def test_states_of_different_steps_do_not_merge():
    task = make_task(numbered(9))
    halves = [data.train_loader(config(task), feature_converter=CONVERTER(), rows=range(i, i + 2)) for i in (0, 2)]
    next(halves[0])
    with pytest.raises(UserError, match="batches is 1, not 0"):
        data.merge_states([half.state() for half in halves])
    halves[0].close()


@pytest.mark.parametrize("rows", [range(0), range(3, 5), range(-1, 2)])
def test_rows_must_be_of_the_batch(rows):
    with pytest.raises(UserError, match="batch of 4"):
        data.train_loader(config(make_task(numbered(9))), feature_converter=CONVERTER(), rows=rows)


def test_errors_come_out_of_next_with_their_own_message(write):
    path = write("x.jsonl", "".join(f'{{"inputs": "{i}", "targets": ""}}\n' for i in range(10)) + "{broken\n")
    source = data.JsonLinesDataSource({"train": path})
    task = data.Task("numbers", source, byte_features(), [preprocessors.tokenize])
    with train(task, shuffle=False) as loader:
        next(loader), next(loader)
        state = loader.state()
        for _ in range(2):
            with pytest.raises(data.BadExample, match=rf"{path}:11: not JSON"):
                next(loader)
        assert loader.state() == state


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_task_that_drops_everything(shuffle):
    def too_short(example):
        return None

    with (
        train(make_task(numbered(7), [preprocessors.tokenize, too_short]), shuffle=shuffle) as loader,
        pytest.raises(UserError, match=r"all 7 .*too_short \(\d+\)"),
    ):
        next(loader)


def test_a_single_survivor_is_found_when_shuffled():
    task = make_task(numbered(40), [lambda e: e if e["inputs"] == "7" else None, preprocessors.tokenize])
    with train(task, batch_size=8) as loader:
        batch = next(loader)
    assert set(batch["encoder_input_tokens"][:, 0]) == {ord("7") + 3}


def test_a_row_without_examples_is_an_error_when_not_shuffled():
    task = make_task(numbered(8), [lambda e: e if int(e["inputs"]) % 4 else None, preprocessors.tokenize])
    with train(task, shuffle=False) as loader, pytest.raises(UserError, match=r"Row 0 .* Set shuffle=True"):
        next(loader)


def test_trimming_off_names_the_example():
    task = make_task([{"inputs": "too long", "targets": "x"}])
    with (
        train(task, trim_output_features=False) as loader,
        pytest.raises(UserError, match=r"example 0 of .*'inputs' has 9 tokens.* 4\."),
    ):
        next(loader)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_too_long_examples_are_skipped_on_request(pack, workers):
    lengths = [1, 3, 9, 2, 9, 4]
    task = make_task([{"inputs": "x" * n, "targets": str(i)} for i, n in enumerate(lengths)], [preprocessors.tokenize])
    cfg = config(
        task, trim_output_features=False, skip_bad_examples=True, shuffle=False, batch_size=1, num_workers=workers
    )
    with data.train_loader(cfg, feature_converter=CONVERTER(pack=pack)) as loader:
        batches = [next(loader) for _ in range(3 if pack else 4)]  # an epoch
        assert loader.counts.bad == 2
    targets = np.concatenate([batch["decoder_target_tokens"][0] for batch in batches])
    assert [i - 3 - ord("0") for i in targets if i] == [0, 1, 3, 5]
    once = list(data.eval_batches(cfg, feature_converter=CONVERTER(), num_examples=4))
    assert [one.examples[0]["targets_pretokenized"] for one in once] == ["0", "1", "3", "5"]


@pytest.mark.parametrize("pack", [False, True])
def test_examples_that_are_all_refused_are_an_error(pack):
    task = make_task([{"inputs": "too long", "targets": "x"}] * 3)
    cfg = config(task, trim_output_features=False, skip_bad_examples=True)
    with (
        data.train_loader(cfg, feature_converter=CONVERTER(pack=pack)) as loader,
        pytest.raises(UserError, match="Every example of task 'task' is invalid"),
    ):
        next(loader)


def test_trimming_may_cut_the_eos_off():
    with train(make_task([{"inputs": "abcdef", "targets": "abc"}])) as loader:
        batch = next(loader)
    assert batch["encoder_input_tokens"][0].tolist() == [100, 101, 102, 103]
    assert batch["decoder_target_tokens"][0].tolist() == [100, 101, 102, 1]


def test_training_needs_lengths():
    with pytest.raises(UserError, match="TASK_FEATURE_LENGTHS"):
        train(make_task(numbered(3)), task_feature_lengths=None)


def test_a_missing_seed_is_zero_and_logged(caplog):
    task = make_task(numbered(20))
    with caplog.at_level(logging.INFO, "t5x"), train(task, seed=None) as loader, train(task, seed=0) as zero:
        np.testing.assert_array_equal(next(loader)["encoder_input_tokens"], next(zero)["encoder_input_tokens"])
    assert "seed" in caplog.text and "using 0" in caplog.text


def evaluate(task, *, num_examples=None, rows=None, **changes):
    cfg = task if isinstance(task, data.DatasetConfig) else config(task, shuffle=False, **changes)
    return list(data.eval_batches(cfg, feature_converter=CONVERTER(), num_examples=num_examples, rows=rows))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_evaluation_has_every_example_once(count):
    batches = evaluate(make_task(numbered(count)), batch_size=4)
    assert len(batches) == -(-count // 4)
    seen = [example["inputs_pretokenized"] for batch in batches for example in batch.examples]
    assert seen == [str(i) for i in range(count)]
    for batch, mask, examples in batches:
        assert mask.shape == (4,)
        assert mask.sum() == len(examples)
        for array in batch.values():
            assert array.shape == (4, 4)
            assert not array[~mask].any()
        firsts = [example["inputs"][0] for example in examples]
        assert batch["encoder_input_tokens"][mask, 0].tolist() == firsts


def test_evaluation_with_filters_and_several_processes():
    def several(example):
        return [example | {"inputs": example["inputs"] * (i + 1)} for i in range(int(example["inputs"]) % 3)]

    task = make_task(numbered(10), [several, preprocessors.tokenize])
    whole = evaluate(task, batch_size=4)
    halves = [evaluate(task, batch_size=4, rows=rows) for rows in (range(2), range(2, 4))]
    assert len(whole) == len(halves[0]) == len(halves[1]) == 3
    for one, *parts in zip(whole, *halves, strict=True):
        for name in one.batch:
            np.testing.assert_array_equal(one.batch[name], np.concatenate([part.batch[name] for part in parts]))
        np.testing.assert_array_equal(one.mask, np.concatenate([part.mask for part in parts]))
        assert len(one.examples) == sum(len(part.examples) for part in parts)


def test_evaluation_measures_lengths(caplog):
    task = make_task([{"inputs": "x" * 20, "targets": ""}, {"inputs": "", "targets": "x" * 7}])
    with caplog.at_level(logging.INFO, "t5x"):
        (batch,) = evaluate(task, task_feature_lengths=None, batch_size=2)
    assert batch.batch["encoder_input_tokens"].shape == (2, 24)  # 21 with EOS
    assert batch.batch["decoder_target_tokens"].shape == (2, 8)
    assert "'inputs': 24, 'targets': 8" in caplog.text


def test_evaluation_by_configuration():
    cfg = config(make_task(numbered(50)), batch_size=8, seed=3)
    batches = evaluate(cfg, num_examples=20)
    seen = [int(example["inputs_pretokenized"]) for batch in batches for example in batch.examples]
    assert len(seen) == len(set(seen)) == 20
    assert seen != sorted(seen)  # the configuration asks for shuffling
    assert [len(batch.examples) for batch in batches] == [8, 8, 4]


def test_evaluation_of_nothing():
    with pytest.raises(UserError, match="dropped or skipped"):
        evaluate(make_task(numbered(3), [lambda e: None]), batch_size=2)
    with pytest.raises(UserError, match="no split 'test'"):
        evaluate(make_task(numbered(3)), split="test", batch_size=2)


def test_real_translation_data(shared_data, t5_model_file):
    """Multi30k with the T5 vocabulary: what is read decodes to what is in the files, and it resumes."""
    paths = {language: str(shared_data / f"multi30k_ende/val.{language}.gz") for language in ("en", "de")}

    def pairs(split):
        sides = {language: data.TextLineDataSource({split: path}) for language, path in paths.items()}
        return [
            {language: side.example(split, i)["text"] for language, side in sides.items()}
            for i in range(sides["en"].num_examples(split))
        ]

    def translate(example):
        return {"inputs": f"translate English to German: {example['en']}", "targets": example["de"]}

    vocabulary = data.SentencePieceVocabulary(t5_model_file, extra_ids=100)
    features = {"inputs": data.Feature(vocabulary), "targets": data.Feature(vocabulary)}
    source = data.FunctionDataSource(pairs, splits=("validation",))
    steps = [translate, preprocessors.tokenize, preprocessors.append_eos_after_trim]
    task = data.Task("multi30k", source, features, steps)
    assert task.num_input_examples("validation") == 1014

    cfg = config(task, split="validation", batch_size=16, task_feature_lengths={"inputs": 64, "targets": 64})
    with data.train_loader(cfg, feature_converter=CONVERTER()) as loader:
        next(loader)
        state = json.loads(json.dumps(loader.state()))
        second = next(loader)
        loader.restore(state)
        np.testing.assert_array_equal(next(loader)["decoder_target_tokens"], second["decoder_target_tokens"])

    examples = [example for batch in evaluate(cfg) for example in batch.examples]
    german = {vocabulary.decode(vocabulary.encode(pair["de"])) for pair in pairs("validation")}
    assert len(examples) == 1014
    assert all(vocabulary.decode(example["targets"]) in german for example in examples)


def test_truncations_by_append_eos_after_trim_are_counted(caplog):
    texts = [{"inputs": "a" * n, "targets": "b"} for n in (2, 5, 6, 7, 30)]
    steps = (data.preprocessors.tokenize, data.preprocessors.append_eos_after_trim)
    with caplog.at_level(logging.INFO, "t5x"), train(make_task(texts, steps), batch_size=5) as loader:
        next(loader)
        length = LENGTHS["inputs"]
        assert loader.counts.trimmed == {"inputs": sum(len(text["inputs"]) >= length for text in texts)}
    assert "'inputs' was truncated" in caplog.text

"""Variants of tests that only `make test-all` runs: for each, a quicker one of the same promise stays in `make test`.

Tests that are slow as a whole carry `@pytest.mark.slow` themselves.
"""

import re

import pytest

# file: patterns of the names of its tests
SLOW = {
    "bench/test_bench.py": [r"test_training_in_fp8_with_recomputation_and_microbatches"],
    "checkpoints/formats/test_huggingface.py": [r"test_tokenizers_give_the_ids_of_the_vocabulary\[umt5\]"],
    "data/test_seqio_runs.py": [r"test_a_mixture_trains_and_is_evaluated"],
    "decoding/test_loop.py": [
        r"test_a_network_continues_with_the_remaining_rows\[(1-scanned|2-unrolled)\]",
        r"test_results_are_those_of_a_single_loop\[(beams|sampling) for each\]",
    ],
    "decoding/test_models.py": [r"test_first_logits\[tied\]", r"test_scores_of_beams_.*\[scanned\]"],
    "inference/test_tasks.py": [r"test_more_chunks_than_five_digits_count"],
    "models/test_models.py": [r"test_the_gradient_of_a_few_logits_is_summed_in_float32\[False\]"],
    "network/test_family_parity.py": [r".*\[(T5 1.0|umT5), unrolled\]"],
    "network/test_flash_attention.py": [
        r"test_no_block_with_work_is_skipped\[[1-68]\]",
        r"test_an_encoder_with_packed_rows_of_an_odd_length\[blocks1\]",
        r"test_a_decoder_in_narrow_types_.*\[float16\]",
    ],
    "network/test_fp8.py": [
        r"test_every_matmul_of_scanned_and_unrolled_layers_has_a_history",
        r"test_devices_that_share_rows_and_parameters_find_the_history_of_one",
        r"test_the_history_does_not_depend_on_microbatches",
        r"test_training_in_fp8_follows_training_without_it",
    ],
    "network/test_initial.py": [r".*\[(bias in every layer|1.0|one layer, recomputed)\]"],
    "network/test_keys.py": [r"test_layers_may_have_a_transform_of_their_own\[remat\]"],
    "network/test_padding.py": [r"test_scores_in_bfloat16_are_those_of_the_reference"],
    "network/test_precision.py": [r"test_cast_once_or_at_every_use\[(False-b?float16|True-float16)\]"],
    "network/test_rounding.py": [
        r"test_layers\[9-151-131\]", r"test_decoding\[4-lengths1\]", r"test_first_logits\[changes1\]",
        r"test_logits_of_decoding_steps\[4-.*\]",
    ],
}  # fmt: skip


def mark(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Mark these tests `slow`.

    Args:
      items: all that were collected.
      whole_files: whether all tests of a file are among them. Then a pattern without a test is an error.
    """
    names: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        names.setdefault(file, {})[name] = item
    for file in SLOW.keys() & names.keys():
        for pattern in SLOW[file]:
            found = [item for name, item in names[file].items() if re.match(pattern, name)]
            if whole_files and not found:
                raise pytest.UsageError(f"tests/slow_variants.py: no test in {file} matches {pattern}")
            for item in found:
                item.add_marker(pytest.mark.slow)

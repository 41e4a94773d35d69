"""Tests that only `make test-all` runs: for each, a quicker one of the same promise stays in `make test`.

Of a parametrised test, some variants stay; otherwise a comment names the files with the quicker tests.

Tests that are slow as a whole carry `@pytest.mark.slow` themselves.
"""

import re

import pytest

# file: patterns of the names of its tests
SLOW = {
    "bench/test_bench.py": [r"test_training_in_fp8_with_recomputation_and_microbatches"],
    "checkpoints/test_kill.py": [r"test_a_kill_at_any_moment_leaves_whole_checkpoints_only"],  # test_together.py
    "checkpoints/formats/test_huggingface.py": [r"test_tokenizers_give_the_ids_of_the_vocabulary\[u?mt5\]"],
    "data/test_seqio_runs.py": [r"test_a_mixture_trains_and_is_evaluated"],
    "runtime/test_user_modules.py": [r"test_a_verb_and_its_workers_import_what_import_names\[tasks\]"],
    "decoding/test_beam.py": [
        r"test_stopping_early_never_changes_the_result\[(random-[12]|ties-[15])\]",
        r"test_a_wide_beam_finds_what_exhaustive_search_finds\[(random-(-0.7|0.6)|ties-(0.0|2.0))\]",
    ],
    # test_constraints.py: a single choice greedily, the most likely ones with beams, many of texts by sampling
    "decoding/test_constraints.py": [r"test_only_choices_are_generated\[(greedy|beam|sample)\]"],
    "decoding/test_hugging_face.py": [
        r"test_beam_search\[(3 beams|4 beams, never early)\]",
        r"test_real_weights_give_the_beams_of_hugging_face",  # inference/test_real.py
    ],
    "decoding/test_loop.py": [
        r"test_a_network_continues_with_the_remaining_rows\[(1-scanned|1-unrolled|2-unrolled)\]",
        r"test_results_are_those_of_a_single_loop\[(beams|sampling) for each\]",
        r"test_results_are_those_of_a_single_loop\[(beams|greedy)\]",
    ],
    "decoding/test_models.py": [
        r"test_first_logits\[tied\]", r"test_scores_of_beams_.*\[scanned\]",
        r"test_the_batch_and_its_padding_change_nothing\[temperature_sample\]",
    ],
    "decoding/test_sampling.py": [r"test_frequencies\[False-(\{\}|\{'topk': 2\}|\{'temperature': 0.5\}|.*'topp'.*)\]"],
    "examples/test_layers.py": [
        r"test_a_users_network_computes_our_logits_and_loss\[1.[01] padded\]",
        r"test_a_users_network_trains",  # models/test_models.py: a third-party module trains
    ],
    "examples/test_recipes.py": [r"test_squad_from_training_to_answers"],  # answering/: each of its steps
    # exporting/test_export.py: the export for TensorFlow alone has beams
    "apps/exporting/test_export.py": [r"test_programs_for_any_number_of_rows_compute_what_the_model_does\[3\]"],
    "inference/test_files.py": [
        r"test_neither_batches_nor_chunks_nor_shards_change_what_is_predicted\[(a beam|greedy)\]",
    ],
    "inference/test_interactive.py": [r"test_few_inputs_get_what_many_do\[beams of Hugging Face\]"],
    # ranking/test_kills.py, answering/test_answers.py, object_stores/test_jobs.py: the same loop
    "inference/test_kills.py": [r"test_two_shards_through_kills", r"test_a_stopped_run_keeps_finished_chunks_.*"],
    "inference/test_tasks.py": [
        r"test_more_chunks_than_five_digits_count",
        r"test_an_interrupted_run_resumes\[False\]", r"test_a_damaged_completed_file_is_reported\[(\[\]|\{)\]",
    ],
    "models/test_models.py": [r"test_the_gradient_of_a_few_logits_is_summed_in_float32\[False\]"],
    "kernels/test_decode_attention.py": [
        r"test_row_offsets_do_not_change_what_is_decoded\[greedy_decode-1\]",
        r"test_decoding_with_the_kernels_is_that_without\[greedy\]",
    ],
    "network/test_decoder_only.py": [
        r"test_logits\[(tied|tied, scanned|untied)-causal-padded\]",
        r"test_greedy_decoding_continues_.*\[prefix\]",
        r"test_scanned_layers_start_from_the_same_values",  # network/test_initial.py: the same stacks, for T5
    ],
    # T5 1.1, mT5 and ByT5 are one architecture; test_weights.py: mT5's own checkpoints
    "network/test_family_parity.py": [
        r".*\[((T5 1.0|umT5|ByT5), unrolled|mT5, scanned)\]", r"test_loss_and_gradients\[umT5, scanned\]",
        r"test_greedy_decoding\[(umT5|T5 1.0), scanned\]",
    ],
    "kernels/test_flash_attention.py": [
        r"test_no_block_with_work_is_skipped\[([1-8]|10)\]",
        r"test_an_encoder_with_packed_rows_of_an_odd_length\[blocks1\]",
        r"test_a_decoder_in_narrow_types_.*\[float16\]",
    ],
    "network/test_fp8.py": [
        r"test_every_matmul_of_scanned_and_unrolled_layers_has_a_history",
        r"test_devices_that_share_rows_and_parameters_find_the_history_of_one",
        r"test_the_history_does_not_depend_on_microbatches",
        r"test_training_in_fp8_follows_training_without_it",
        r"test_a_resumed_run_is_bitwise_the_uninterrupted_one\[unrolled\]",
        r"test_matmuls_are_exact_for_the_rounded_operands\[(two kernels-bfloat16|fused-float32)\]",
    ],
    "network/test_initial.py": [
        r".*\[(bias in every layer|1.0|one layer, recomputed|scanned)\]",
        r"test_scanned_layers_start_from_the_same_values\[0\]",
    ],
    "network/test_keys.py": [r"test_layers_may_have_a_transform_of_their_own\[(remat|jit)\]"],
    "network/test_padding.py": [r"test_scores_in_bfloat16_are_those_of_the_reference"],
    "network/test_parity.py": [
        r"test_logits\[(1.0-long|odd-p.*)\]",
        r"test_loss_and_gradients\[(1.0-packed|1.1-padded|odd-.*)-.*\]", r"test_greedy_decoding_and_scores\[1.0\]",
    ],
    "network/test_precision.py": [r"test_cast_once_or_at_every_use\[(False-b?float16|True-float16|True-float32)\]"],
    "kernels/test_prepared_attention.py": [
        r"test_prepared_attention_is_bitwise_the_same\[(?!packed).*\]",
        r"test_networks_that_prepare_have_the_logits_and_gradients_of_the_reference\[(?!dropout).*\]",
        # the logits of networks[dropout], and a decoder alone without gradients
        r"test_inference_prepares_and_computes_the_same_as_the_reference",
        r"test_devices_prepare_and_compute_their_own_rows_and_heads\[uneven\]",
        r"test_a_layer_may_attend_with_some_of_the_rows\[padding\]",
    ],
    "network/test_rounding.py": [
        r"test_layers\[9-151-131\]", r"test_gates\[9-131-.*\]",
        r"test_decoding\[(4-lengths1|1-lengths0)\]", r"test_first_logits\[changes1\]",
        r"test_logits_of_decoding_steps\[(4-.*|1-changes0)\]", r"test_the_loss_without_all_logits\[(4|9)-.*\]",
    ],
    "network/test_transformer.py": [
        r"test_scan_and_remat_change_nothing_but_the_program\[(False-minimal|True-none|True-full)\]",
        r"test_kernels_joined_for_inference_compute_the_same\[0\]",
        r"test_float16_holds_a_residual_beyond_its_range\[False\]",
    ],
    # test_eval.py: an evaluation that is started again; object_stores/test_jobs.py: killed jobs there
    "object_stores/test_evaluation.py": [r"test_a_killed_evaluation_continues_with_the_next_checkpoint"],
    "object_stores/test_jobs.py": [
        r"test_a_killed_job_resumes_in_spite_of_faults\[(s3-rerank|gcs-infer|s3-answer)\]",
    ],
    "object_stores/test_remote_paths.py": [
        r"test_checkpoints_are_written_and_read_in_spite_of_faults\[(gcs-native|s3-hf|s3-t5x)\]",
    ],
    "object_stores/test_runs.py": [
        r"test_a_run_that_resumes_there_ends_like_a_local_one\[gcs\]", r"test_metrics_are_there_.*\[s3\]",
    ],
    "object_stores/test_task_inference.py": [r".*"],  # object_stores/test_jobs.py; inference/test_tasks.py
    "apps/planning/test_plan.py": [r"test_a_sharded_state_takes_less_memory_and_more_communication\[all presets\]"],
    "partitioning/test_consistency.py": [r"test_another_configuration_is_refused\[infer\]"],
    "apps/ranking/test_models.py": [r"test_eight_devices_find_what_one_does"],  # partitioning/test_meshes.py
    "saved/test_saved.py": [
        r"test_config_gin_repeats_the_run_from_its_beginning\[(pairs|ranker)\]",
        r"test_a_job_computes_the_chunks_of_one_that_was_stopped\[(answer|rerank)\]",
    ],
    "apps/serving/test_server.py": [r"test_constraints_are_those_of_the_python_api_.*"],  # decoding/test_constraints.py
    "cli/test_cli.py": [
        r"test_a_signal_while_xla_compiles_ends_the_program_at_once\[SIGTERM-.*\]",
        r"test_a_mixture_is_inferred_task_by_task",  # inference/test_tasks.py
        r"test_eval_scores_every_checkpoint_once",  # test_eval.py
    ],
    "compat/t5x_projects/test_public_patterns.py": [r"test_lists_are_folded_into_the_batch\[OwnTowers\]"],
    "compat/t5x_names/test_behaviour.py": [r"test_parts_of_a_network_compute_what_the_network_does\[untied\]"],
    "checkpoints/test_convert.py": [r"test_optimizer_state_arrives_exactly\[unrolled\]", r"test_signals\[SIGINT-t5x\]"],
    "optimizers/test_adafactor.py": [r"test_fifty_steps_in_float32\[norm, decay by the rate\]"],
    "optimizers/test_optimizers.py": [
        r"test_an_adamw_checkpoint_loads_into_scanned_and_unrolled_layers\[False\]",
        # One function wraps them all; those with arguments of their own stay.
        r"test_twenty_steps_equal_optax\[(adabelief|adagrad|fromage|lamb|lars|radam|yogi)\]",
    ],
    "runs/test_resumed_data.py": [r"test_all_of_several_processes_refuse"],  # partitioning/test_distributed.py
    "runs/test_train.py": [r"test_a_signal_saves_and_the_run_goes_on\[2-130\]"],
    "checkpoints/test_weights.py": [r"test_parity_with_hugging_face\[(mT5-False|T5 1.1-True|T5 1.0-False|umT5-True)\]"],
    "trainer/test_dropout.py": [r".*\[scanned\]"],
    "trainer/test_signals.py": [r"test_an_evaluation_of_several_processes_is_interrupted"],  # launching/test_local.py
    "trainer/test_step.py": [
        r"test_three_steps_agree_with_an_independent_float64_computation\[1.0\]",
        r"test_the_number_of_microbatches_changes_nothing\[None\]",
        # network/test_transformer.py: the same gradients; checkpoints/test_layout.py: the same update
        r"test_scanned_and_unrolled_layers_take_the_same_steps",
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

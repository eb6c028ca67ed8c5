"""`python -m tests.mutants.run`: apply each seeded fault to a copy of the sources and expect its
tests to turn red.

A test suite that stays green on a broken engine proves nothing. Each `.patch` beside this file is
one fault; the table names the tests that must catch it, as pytest's arguments.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHES = "tests/kv_cache/test_cache_stateful.py"
KEPT = "tests/kv_cache/test_kept.py"
KEPT_FILES = "tests/engine/test_kept_files.py"
INVARIANCE = "tests/invariance/test_schedule_invariance.py"
ON_CPU, ON_REFERENCE = f"{INVARIANCE} -k cpu", f"{INVARIANCE} -k reference"
SCHEDULE = "tests/scheduling/test_schedule.py"
OPERATIONS = "tests/ops/test_reference.py"
BATCHES = "tests/test_batch.py"
DRAFTS = "tests/speculation/test_bits.py"
MODEL_DRAFTS = "tests/speculation/test_model_drafts.py"
ATTENTION = "tests/ops/test_cpu_attention.py"
STATES = "tests/ops/test_cpu_states.py"
CODES = "tests/ops/test_quantised.py"
KV_CODES = "tests/ops/test_kv_codes.py"
SIMULATION = "tests/simulation/test_simulation.py"
POLICIES = "tests/engine/test_kv_policies.py"
ON_CUDA = "tests/invariance/test_triton_invariance.py -k"
WINDOW_CACHES = "tests/kv_cache/test_window_cache.py"
PAGED = "tests/ops/test_triton_attention.py"
ROUTED = "tests/engine/test_routed_experts.py"
TRAINING = "tests/training_service/test_service.py"
CATCHES = {
    "linear_splits_k_by_rows": ON_REFERENCE,
    "attention_tiles_from_chunk_start": ON_REFERENCE,
    "block_tail_is_read": ON_REFERENCE,
    "cpu_linear_splits_k_by_rows": ON_CPU,
    "cpu_attention_starts_at_the_chunk": ON_CPU,
    "cpu_block_tail_is_read": ON_CPU,
    "cpu_tiles_cut_chunks_of_keys": f"{ATTENTION} -k 'however and tiles'",
    "cpu_tiles_of_eight_pairs": "tests/ops/test_cpu_ops.py -k law",
    "cpu_tiles_begin_before_the_segment": "tests/parallel/test_segments.py -k kernels --tier quick",
    "fingerprint_without_sums": "tests/ops/test_cpu_build.py -k whole_generation",
    "cpu_head_sums_by_thread": ON_CPU,
    "cpu_latent_products_of_one_head": "tests/ops/test_cpu_latent.py -k bound",
    "cpu_latent_values_of_another_tile": "tests/models/test_families.py -k 'agrees and v3-cpu'",
    "gguf_latent_keys_unturned": "tests/models/test_gguf_families.py -k 'agrees and deepseek-v3'",
    "triton_linear_splits_k_by_rows": "tests/ops/test_triton_matmul.py -k beside",
    "triton_attention_tiles_from_the_chunk": f"{ON_CUDA} chosen",
    "triton_noise_by_the_first_sample": f"{ON_CUDA} memory_is_short",
    "segments_merged_in_order_of_arrival": "tests/parallel/test_tensor_parallel.py -k wide",
    "kept_mass_without_masks": "tests/sampling/test_pipeline.py -k 'float64 and torch'",
    "cpu_kept_mass_without_masks": "tests/sampling/test_pipeline.py -k 'float64 and cpu'",
    "grammar_mask_of_the_wrong_row": "tests/engine/test_grammar.py -k 'two_hundred or follow'",
    "grammar_mask_one_token_late": "tests/engine/test_grammar.py -k follow",
    "grammar_error_taken_for_an_end": "tests/structured/test_grammar.py -k limit",
    "grammar_samples_share_a_matcher": "tests/engine/test_grammar.py -k follow",
    "grammar_thought_closed_by_a_longer_token": "tests/structured/test_thought.py -k thought",
    "grammar_rolled_back_one_too_few": "tests/structured/test_grammar.py -k rollback",
    "draft_rows_count_at_once": f"{DRAFTS} -k 'llama and plain'",
    "drafts_behind_a_wrong_one_count": f"{SCHEDULE} -k drafts",
    "draft_blocks_are_kept": f"{SCHEDULE} -k drafts",
    "accepted_rows_leave_no_window": f"{DRAFTS} -k 'gemma3 and plain'",
    "drafts_under_the_first_mask": f"{DRAFTS} -k 'llama and grammar'",
    "penalties_without_drafts": f"{DRAFTS} -k 'llama and penalties'",
    "drafts_take_reserved_blocks": f"{SIMULATION} -k drafts",
    "eagle_skips_accepted_rows": "tests/speculation/test_heads.py -k 'formula and eagle'",
    "medusa_head_off_by_one": "tests/speculation/test_heads.py -k 'formula and medusa'",
    "wrong_drafts_stay_computed": f"{MODEL_DRAFTS} -k computes_anew",
    "silent_model_takes_the_texts_place": f"{MODEL_DRAFTS} -k knows_nothing",
    "cpu_state_lacks_the_last_row": f"{STATES} -k reference_computes",
    "cpu_state_of_another_sequence": f"{STATES} -k reference_computes",
    "cpu_decay_left_out": f"{STATES} -k reference_computes",
    "state_one_row_early": "tests/models/test_states.py -k 'qwen3_5_agrees and reference'",
    "state_taken_one_token_early": f"{STATES} -k behind_the_window",
    "cpu_sink_of_the_groups_first_head": "tests/models/test_families.py -k 'agrees and gpt-oss and cpu'",
    "latents_without_their_norm": "tests/models/test_families.py -k 'agrees and deepseek-v3'",
    "quantised_scales_of_another_group": "tests/models/test_quantised.py -k stands_for",
    "cpu_codes_eight_too_large": f"{CODES} -k 'bits_of_the_definition and cpu'",
    "cpu_codes_inputs_of_the_tiles_first_row": f"{CODES} -k 'bits_of_the_definition and cpu'",
    "cpu_codes_in_one_segment": f"{CODES} -k 'bits_of_the_definition and cpu'",
    "codes_of_whole_rows_under_groups": f"{CODES} -k 'bits_of_the_definition and cpu'",
    "cpu_codes_of_a_groups_first_columns": f"{CODES} -k 'bits_of_the_definition and cpu'",
    "ranks_share_codes_of_other_columns": "tests/parallel/test_tensor_parallel.py -k of_a_file",
    "checkpoint_zero_points_unmoved": "tests/models/test_checkpoint_codes.py -k 'dequantised_to and gptq-8bit'",
    "kv_codes_of_the_whole_step": f"{KV_CODES} -k 'largest or stand_for'",
    "cpu_kv_scales_of_the_blocks_first_group": "tests/ops/test_cpu_attention.py -k double",
    "draft_codes_of_old_weights": f"{MODEL_DRAFTS} -k codes_of",
    "gguf_blocks_always_in_bfloat16": "tests/models/test_gguf_numbers.py -k rounded_once",
    "gguf_minimum_is_added": "tests/models/test_gguf_codes.py -k stand_for",
    "gguf_neighbours_stay_together": "tests/models/test_gguf.py -k round_trip",
    "harmony_commentary_is_reasoning": "tests/serving/parsing/test_harmony.py",
    "masked_odds_keep_all": "tests/ops/test_cpu_head.py -k masked_draw",
    "vocabulary_tie_to_the_later_rank": "tests/parallel/test_head.py -k lower",
    "prefix_match_one_too_long": INVARIANCE,
    "planned_while_on_its_way": "tests/simulation/test_stages.py -k random",
    "residual_sent_before_the_addition": "tests/parallel/test_stages.py -k stages_change",
    "readmitted_while_in_flight": SCHEDULE,
    "fork_writes_shared_block": SIMULATION,
    "old_weights_match": SIMULATION,
    "matched_blocks_not_counted": SIMULATION,
    "most_recently_used_first": CACHES,
    "radix_splits_one_block_early": CACHES,
    "radix_path_in_use_is_evicted": CACHES,
    "radix_ancestor_before_leaf": CACHES,
    "merged_rounded_twice": "tests/engine/test_merging.py -k apart",
    "merged_and_added_again": "tests/engine/test_merging.py -k apart",
    "unmerged_under_a_request": "tests/engine/test_merging.py -k keeps_it_merged",
    "update_that_began_overwrites_the_merged": "tests/engine/test_merging.py -k began_before",
    "blocks_of_two_versions_are_kept": "tests/engine/test_adapters.py -k two_versions",
    "kept_blocks_go_first": f"{KEPT} -k pressure",
    "kept_priority_is_not_asked": f"{KEPT} -k lowest",
    "kept_for_ever": f"{KEPT} -k over",
    "kept_outlives_its_update": f"{KEPT_FILES} -k drop",
    "kept_files_are_not_compared": f"{KEPT_FILES} -k damaged",
    "window_left_one_block_early": SIMULATION,
    "window_moves_before_the_step": SIMULATION,
    "stripped_block_matches": WINDOW_CACHES,
    "shared_layers_read_the_first_ones_keys": "tests/models/test_gemma4.py -k 'no_two or share'",
    "window_one_too_wide": OPERATIONS,
    "scored_rows_from_the_cache": SIMULATION,
    "block_table_of_the_readmitted_is_stale": BATCHES,
    "samples_are_not_multiplied": "tests/test_budget.py",
    "prompts_count_one_by_one": "tests/serving/test_request_budget.py -k batch",
    "masks_grow_without_end": "tests/engine/test_request_budget.py",
    "other_scores_count_as_told": "tests/serving/test_common_parts.py -k told_again",
    "old_context_one_too_short": SIMULATION,
    "previous_has_the_new_name": POLICIES,
    "previous_weights_change": POLICIES,
    "group_ends_one_late": "tests/engine/test_groups.py",
    "shortage_is_shared_by_groups": "tests/simulation/test_groups.py -k alone",
    "experts_add_up_as_they_arrive": "tests/ops/test_moe.py -k where_an_expert",
    "experts_products_by_the_number_of_rows": "tests/ops/test_moe.py -k bits_know",
    "lockstep_updates_alone": "tests/engine/test_lockstep.py -k serve_in_the_same",
    "triton_attention_reads_the_tail": f"{ON_CUDA} memory_is_short",
    "triton_attention_walks_whole_rows_at_once": PAGED,
    "triton_attention_tiles_from_the_window": f"{PAGED} -k 'own and 21'",
    "context_merged_as_it_arrives": "tests/parallel/test_context_parallel.py -k to_the_bit",
    "replicas_of_other_numerics": "tests/serving/fleet/test_fleet.py -k alike",
    "some_replicas_sleep_on": "tests/serving/fleet/test_operations.py -k sleep_that_one_refuses",
    "repeated_text_is_cut_twice": "tests/serving/fleet/test_fleet.py -k counted_down",
    "moved_logprobs_are_not_compared": "tests/serving/fleet/test_fleet.py -k other_logprobs",
    "moved_deltas_have_one_token": "tests/serving/fleet/test_replicas.py -k amid_drafts",
    "ties_to_the_first_replica": "tests/serving/fleet/test_router.py -k take_turns",
    "new_engines_do_not_wait": "tests/serving/test_backoff.py",
    "failover_buckets_do_not_add_up": "tests/serving/test_metrics.py -k add_up",
    "suspects_move_for_ever": "tests/serving/fleet/test_suspects.py",
    "suspects_side_by_side": "tests/serving/fleet/test_suspects.py",
    "usage_counts_pieces": "tests/serving/test_openai_answers.py -k stream",
    "joined_logprobs_in_another_order": "tests/serving/test_choices.py",
    "marker_in_pieces_is_text": "tests/serving/parsing/test_parsing.py",
    "stop_string_in_pieces_is_shown": "tests/text/test_output_text.py",
    "admission_forgets_the_newcomer": "tests/serving/test_exchange.py -k full_queue",
    "api_keys_change_the_engine": "tests/serving/rl/test_access.py -k keys",
    "pages_may_train": "tests/serving/rl/test_access.py -k pages",
    "new_engine_is_paused_too": "tests/serving/rl/weights/test_weight_races.py -k not_paused",
    "failed_call_leaves_the_session_open": "tests/serving/rl/weights/test_weight_files.py -k "
    "no_such_file",
    "refused_tensors_stay_in_the_update": "tests/serving/rl/weights/test_weight_files.py -k "
    "closes_a_session",
    "versions_may_fall": "tests/serving/rl/weights/test_weight_updates.py -k versions_rise",
    "sglang_buckets_one_by_one": 'tests/serving/rl/test_sglang_updates.py -k "slime_like_trainer '
    'and not smollm2"',
    "refused_request_leaves_the_session_open": "tests/serving/rl/test_refused_updates.py -k "
    '"sglangs or vllms"',
    "depth_counts_lists_alone": "tests/serving/test_edge.py -k depth",
    "tensors_begin_where_the_last_ended": "tests/engine/test_weight_transports.py -k "
    '"side_by_side"',
    "old_marker_beside_new_files": "tests/engine/test_weight_transports.py -k written_anew",
    "parameters_written_once": "tests/rl/test_policy_model.py -k every_way",
    "shared_scores_one_too_far": "tests/rl/test_score.py -k share",
    "scores_share_other_masks": "tests/rl/test_grammar.py -k share_what_is_common",
    "scored_under_the_mask_before": "tests/rl/test_grammar.py -k several_grammars",
    "gradients_without_masks": "tests/rl/test_grammar.py -k autograd",
    "replay_bans_the_end_of_a_grammar": "tests/rl/test_grammar.py -k made_again",
    "replay_keeps_the_masks_of_a_draft": "tests/rl/test_grammar.py -k made_again",
    "replay_keeps_rows_of_other_weights": "tests/rl/test_replay.py -k mixed_versions",
    "shared_targets_are_overwritten": "tests/rl/test_gradients.py -k micro_batches_hold",
    "gradients_add_up_from_the_last": "tests/rl/test_gradients.py -k same_bits",
    "trl_draws_the_same_each_turn": "tests/rl/test_trl.py -k decided_by",
    "trl_mask_covers_the_padding": "tests/rl/test_trl.py -k mismatch",
    "trl_logprobs_without_the_cut": "tests/rl/test_trl.py -k filters_cut",
    "trl_is_never_greedy": "tests/rl/test_trl.py -k arguments_decide",
    "appended_tokens_are_trained_on": "tests/test_data.py -k padded",
    "own_weights_before_given_ones": 'tests/rl/test_replay.py -k "state_dicts or changed_sample '
    'or mixed"',
    "experts_routed_again_in_the_backward": "tests/rl/test_expert_routes.py -k made_to_choose",
    "sinks_lost_by_the_merge": "tests/ops/test_partial_attention.py -k 'states and reference'",
    "routes_read_one_slot_late": "tests/rl/test_expert_routes.py -k goes_through",
    "routes_stay_behind_in_copied_blocks": f"{ROUTED} -k copied_block",
    "routed_experts_of_the_next_token": f"{ROUTED} -k copied_block",
    "old_weights_leave_no_routes": f"{ROUTED} -k 'in_the_middle and finish_old'",
    "foreign_blocks_keep_their_slots_routes": f"{ROUTED} -k another_engine",
    "blocking_update_looks_at_itself_alone": "tests/engine/test_blocking_updates.py -k every_short",
    "cpu_adapter_of_the_first_row": "tests/ops/test_lora.py -k its_own",
    "adapter_of_the_step_for_all_rows": "tests/invariance/test_adapter_invariance.py -k 'shares and reference'",
    "blocks_of_an_older_adapter_match": "tests/engine/test_adapters.py -k leaves_those",
    "begun_samples_take_the_new_adapter": "tests/engine/test_adapters.py -k leaves_those",
    "memory_of_a_served_adapter_is_written": "tests/engine/test_adapters.py -k memory_of",
    "adapter_rows_as_the_checkpoint_has_them": "tests/models/test_lora.py -k 'peft and next'",
    "draws_know_no_adapter_of_the_head": "tests/rl/test_lora_policy.py -k 'engines_to and reference'",
    "repeated_requests_are_done_again": f"{TRAINING} -k come_twice",
    "gradients_outlive_their_step": f"{TRAINING} -k add_up",
    "gradients_of_a_failed_step_are_applied": f"{TRAINING} -k half_applied",
    "moments_stay_behind_at_a_restore": f"{TRAINING} -k to_the_bit",
    "clients_share_samplers_of_a_number": f"{TRAINING} -k each_from_its_own",
    "samplers_leave_under_their_users": f"{TRAINING} -k few_slots",
    "checkpoints_of_other_runs_take_nothing": f"{TRAINING} -k checkpoints_take",
    "replaced_checkpoints_are_lost_in_a_crash": "tests/training_service/test_checkpoints.py -k crash",
    "deadline_of_a_closed_gap_runs_on": f"{TRAINING} -k closed_in_time",
    "padding_has_a_ratio": "tests/training_service/test_losses.py -k multiplied_by_0",
    "text_beside_a_call_is_lost": "tests/serving/openai/test_openai_responses.py -k one_after",
    "a_response_forgets_those_before": "tests/serving/openai/test_openai_responses.py -k goes_on",
    "hash_knows_no_upper_halves": "tests/rl/test_parameter_states.py",
}
SECONDS = 400  # for one fault; a run that does not end is red too
RED = 1  # pytest's exit code for failed tests; others mean that the tests did not run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to try; none: all")
    parser.add_argument(
        "--one-of", type=int, default=1, help="only every n-th fault; the commit decides which"
    )
    parser.add_argument("--tier", default="all", help="of tests/depth.py, to see what it notices")
    arguments = parser.parse_args()
    root = Path(__file__).parents[2]
    names = (
        arguments.names or list(CATCHES)[commit_number(root) % arguments.one_of :: arguments.one_of]
    )
    green = [name for name in names if not turns_red(root, name, arguments.tier)]
    if green:
        raise SystemExit(f"not caught: {', '.join(green)}")
    print(f"{len(names)} passed, 0 failed")


def commit_number(root: Path) -> int:
    """A number that another commit seldom has; 0 outside of a git checkout."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return int(found.stdout.strip() or "0", 16)


def turns_red(root: Path, name: str, tier: str = "all") -> bool:
    """Whether the tests of a fault fail on a copy that has it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", copy)
        patch = root / f"tests/mutants/{name}.patch"
        subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
        # Kernels with a fault are built in the copy; all others are those that the home folder has.
        home = copy if "/kernels/" in patch.read_text(encoding="utf-8") else Path.home()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
        ]
        command += ["--tier", tier, "--hypothesis-profile=mutants", *shlex.split(CATCHES[name])]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env={
                    "PATH": "/usr/bin:/bin",
                    "PYTHONPATH": f"{copy / 'src'}:{copy}",
                    "HOME": str(home),
                },
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            caught, how = done.returncode == RED, _last_failure(done.stdout)
        except subprocess.TimeoutExpired:
            caught, how = True, f"no end within {SECONDS} s"
    verdict = "red" if caught else "GREEN OR BROKEN"
    print(f"{verdict:<16} {name} ({time.perf_counter() - began:.0f} s): {how}", flush=True)
    return caught


def _last_failure(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return lines[-1][:160] if lines else output[-160:].replace("\n", " ")


if __name__ == "__main__":
    main()

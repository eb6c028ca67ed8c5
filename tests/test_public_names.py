"""The public API as one table: names, fields and defaults that users' scripts rely on."""

import dataclasses
import inspect
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import nano_inference
import nano_inference.rl
from nano_inference import (
    AdapterInfo,
    Block,
    CacheAllocation,
    Delta,
    EngineConfig,
    EngineStats,
    InferenceEngine,
    KVCacheManager,
    LogprobMatrix,
    PagedKVCache,
    RadixKVCache,
    Receipt,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    TrainingSample,
    VersionSpan,
    WeightSyncManager,
    WeightUpdate,
    errors,
)
from nano_inference.types import SpeculationStats, UpdateOptions

REQUIRED = object()

NAMES = {
    *(
        "InferenceEngine",
        "EngineConfig",
        "SamplingParams",
        "SchedulerConfig",
        "SchedulerOutput",
        "CacheAllocation",
    ),
    *(
        "TrainingSample",
        "VersionSpan",
        "SamplingMask",
        "LogprobMatrix",
        "Receipt",
        "RoutedExperts",
        "EngineStats",
        "ContextVersions",
        "Sequence",
        "SequenceStatus",
        "Block",
    ),
    *("AsyncInferenceEngine", "Delta", "Grammar", "TopLogprobs", "SamplingPipeline"),
    *(
        "KVCacheManager",
        "PagedKVCache",
        "RadixKVCache",
        "WeightSyncManager",
        "WeightUpdate",
        "WeightPatch",
    ),
    *("schedule", "sample_with_logprobs", "model_forward", "compute_block_hash"),
    *(
        "NanoInferenceError",
        "ConfigError",
        "LacksMemory",
        "LacksMemoryToWake",
        "ModelLoadError",
        "InvalidRequest",
        "RequestTooLarge",
    ),
    *("VersionGone", "WeightUpdateError", "WeightUpdateConflict", "WeightTransferError"),
    *("RequestAborted", "EngineDead", "RankLost"),
    *("AdapterError", "AdapterInfo", "AdapterNotFound", "LoraSettings"),
    *("Conversation", "TokenSpan", "TemplateRewritesPast"),
}

FIELDS: dict[type, dict[str, Any]] = {
    EngineConfig: {
        "model_path": REQUIRED,
        "tokenizer_path": None,
        "ref_model_path": None,
        "cache_type": "paged",
        "block_size": 16,
        "max_batch_size": 256,
        "max_tokens_per_batch": 8192,
        "max_chunk_tokens": None,
        "max_model_len": None,
        "kv_cache_memory": None,
        "kv_cache_dtype": "auto",
        "gpu_memory_utilization": 0.9,
        "dtype": "auto",
        "quantization": "auto",
        "device": "auto",
        "backend": "auto",
        "attention": "auto",
        "cpu_sums": "auto",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "lookahead": None,
        "batch_invariant": None,
        "cuda_graphs": True,
        "cuda_overlap": False,
        "num_threads": None,
        "max_request_entries": 5_000_000,
        "grammar_backend": "llguidance",
        "speculation": "none",
        "draft_model": None,
        "draft_layers": None,
        "draft_quantization": None,
        "max_drafts": 8,
        "enable_return_routed_experts": False,
        "max_loras": 0,
        "max_lora_rank": 64,
        "loras": (),
        "kept_cache_folder": None,
        "kept_cache_bytes": None,
        "receipt_key": None,
        "seed": None,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "rank_timeout": 60.0,
    },
    SamplingParams: {
        "temperature": 1.0,
        "max_tokens": 256,
        "stop_token_ids": frozenset(),
        "stop": (),
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "min_tokens": 0,
        "ignore_eos": False,
        "seed": None,
        "top_logprobs": 0,
        "prompt_logprobs": False,
        "raw_logprobs": False,
        "sampling_mask": False,
        "cache_salt": None,
        "priority": 0,
        "prompt_top_logprobs": 0,
        "grammar": None,
        "adapter": None,
        "routed_experts": False,
        "keep_cache_seconds": 0.0,
        "cache_priority": 0,
        "thinking_token_budget": None,
        "bad_words": (),
        "logprob_token_ids": (),
        "prompt_logprob_token_ids": (),
        "prompt_logprob_start": 0,
        "logits_processors": (),
        "receipt": False,
    },
    TrainingSample: {
        "prompt_tokens": REQUIRED,
        "completion_tokens": REQUIRED,
        "logprobs": REQUIRED,
        "ref_logprobs": REQUIRED,
        "weight_version": REQUIRED,
        "finish_reason": REQUIRED,
        "stop_reason": None,
        "weight_versions": (),
        "raw_logprobs": None,
        "log_kept_mass": None,
        "sampling_mask": None,
        "top_logprobs": None,
        "prompt_logprobs": None,
        "numerics": "",
        "seed": 0,
        "sample_index": 0,
        "request_id": 0,
        "cached_tokens": 0,
        "text": None,
        "kv_versions": (),
        "loss_mask": (),
        "sampling_params": None,
        "prompt_top_logprobs": None,
        "adapter_versions": (),
        "routed_experts": None,
        "routed_experts_unknown": None,
        "group_id": None,
        "token_id_logprobs": None,
        "raw_token_id_logprobs": None,
        "prompt_token_id_logprobs": None,
        "receipt": None,
    },
    SchedulerConfig: {
        "max_batch_size": 256,
        "max_tokens_per_batch": 8192,
        "block_size": 16,
        "max_chunk_tokens": None,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "groups": 1,
        "max_drafts": 0,
    },
    CacheAllocation: {"block_ids": REQUIRED, "cached_length": REQUIRED},
    Delta: {
        "request_id": REQUIRED,
        "sample_index": REQUIRED,
        "token_ids": REQUIRED,
        "logprobs": REQUIRED,
        "text": REQUIRED,
        "finished": None,
        "top_logprobs": None,
        "raw_logprobs": None,
        "cached_tokens": 0,
        "queued": 0.0,
        "log_kept_mass": None,
        "weight_version": 0,
        "past_versions": (),
        "adapter_version": 0,
        "token_id_logprobs": None,
        "raw_token_id_logprobs": None,
    },
    AdapterInfo: {
        "name": REQUIRED,
        "version": REQUIRED,
        "rank": REQUIRED,
        "targets": REQUIRED,
        "num_bytes": REQUIRED,
        "folder": None,
    },
    VersionSpan: {"version": REQUIRED, "start": REQUIRED, "end": REQUIRED},
    SamplingMask: {"offsets": REQUIRED, "token_ids": REQUIRED},
    LogprobMatrix: {"shape": REQUIRED, "data": REQUIRED},
    Receipt: {
        "format": REQUIRED,
        "weights": REQUIRED,
        "adapters": REQUIRED,
        "links": REQUIRED,
        "head": REQUIRED,
        "public_key": b"",
        "signature": b"",
        "file_place": None,
    },
    RoutedExperts: {"shape": REQUIRED, "dtype": REQUIRED, "data": REQUIRED},
}

RL_NAMES = {
    *("MismatchReport", "PolicyModel", "differences", "mismatch_report", "replay", "score"),
    "top_tokens",
}
RL_NAMES |= {"AdamW", "GradientShards", "LoraPolicy", "Verdict", "Workers", "clip_grad_norm_"}
RL_NAMES |= {"exact_sum", "one_rank", "portable_exp"}
RL_NAMES |= {"misplaced", "verify"}

# Names and fields of the engine's original specification: classes and their required members.
FIRST_NAMES: dict[type, set[str]] = {
    Block: {"block_id", "ref_count", "hash", "token_ids"},
    Sequence: {"seq_id", "token_ids", "block_ids", "num_computed_tokens", "status", "append_token"},
    SchedulerOutput: {"prefill_seqs", "decode_seqs", "preempted_seqs"},
    KVCacheManager: {"allocate", "deallocate", "num_free_blocks", "flush"},
    PagedKVCache: {"allocate", "deallocate", "num_free_blocks", "flush", "hash_to_block", "blocks"},
    RadixKVCache: {"allocate", "deallocate", "num_free_blocks", "flush", "blocks"},
    WeightSyncManager: {"start_sync", "maybe_finish_sync", "sync_blocking"},
    WeightUpdate: {"done", "result"},
}

# Parameters after self: name -> default.
SIGNATURES: dict[str, dict[str, Any]] = {
    "generate": {
        "prompts": REQUIRED,
        "sampling_params": REQUIRED,
        "num_samples_per_prompt": 1,
        "stream": False,
        "progress": None,
        "num_wanted": None,
    },
    "generate_text": {"prompt": REQUIRED, "sampling_params": None, "stream": False},
    "add_request": {
        "prompt": REQUIRED,
        "params": REQUIRED,
        "num_samples": 1,
        "min_version": None,
        "max_staleness": None,
        "num_wanted": None,
        "exact_version": None,
        "turn_of": None,
    },
    "resume_from": {
        "sample": REQUIRED,
        "append": (),
        "max_new_tokens": None,
        "version": None,
        "sink": None,
    },
    "pause": {"mode": "keep"},
    "resume": {},
    "is_paused": {},
    "sleep": {"weights": False, "memory": None},
    "wake": {"memory": None},
    "sleeping": {},
    "weights_checksum": {},
    "step": {},
    "has_pending": {},
    "abort": {"request_ids": None},
    "update_weights": {
        "weights": REQUIRED,
        "blocking": False,
        "options": REQUIRED,  # of `UpdateOptions`
    },
    "get_weight_version": {},
    "flush_cache": {},
    "stats": {},
    "shutdown": {},
}


def test_public_api_holds_exactly_these_names() -> None:
    assert set(nano_inference.__all__) == NAMES
    assert sorted(nano_inference.__all__) == nano_inference.__all__
    assert all(hasattr(nano_inference, name) for name in NAMES)
    assert set(nano_inference.rl.__all__) == RL_NAMES
    assert all(callable(getattr(nano_inference.rl, name)) for name in RL_NAMES)


def defaults(cls: type) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        made = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else REQUIRED
        )
        values[field.name] = field.default if field.default is not dataclasses.MISSING else made
    return values


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_fields_and_defaults(cls: type) -> None:
    assert defaults(cls) == FIELDS[cls]
    assert list(defaults(cls)) == list(FIELDS[cls]), (
        "the order is part of it: fields may be given by place"
    )
    assert cls.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("cls", FIRST_NAMES, ids=lambda cls: cls.__name__)
def test_names_of_the_original_specification_still_exist(cls: type) -> None:
    names = set(dir(cls)) | (set(defaults(cls)) if dataclasses.is_dataclass(cls) else set())
    if cls is PagedKVCache:
        names |= vars(PagedKVCache(1, 1)).keys()
    assert FIRST_NAMES[cls] <= names


def test_methods_of_the_engine() -> None:
    for name, expected in SIGNATURES.items():
        parameters = list(inspect.signature(getattr(InferenceEngine, name)).parameters.values())[1:]
        signatures = {
            p.name: REQUIRED if p.default is inspect.Parameter.empty else p.default
            for p in parameters
        }
        assert signatures == expected, name


def test_weight_update_has_these_options() -> None:
    assert set(get_type_hints(UpdateOptions)) == {
        "kv_policy",
        "version",
        "complete",
        "check_finite",
    }


def test_additions_to_methods_are_keyword_only() -> None:
    for name, keyword in [
        ("generate", "stream"),
        ("generate", "progress"),
        ("add_request", "min_version"),
    ]:
        parameter = inspect.signature(getattr(InferenceEngine, name)).parameters[keyword]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_free_functions_keep_their_arguments() -> None:
    def arguments(name: str) -> list[str]:
        return list(inspect.signature(getattr(nano_inference, name)).parameters)

    assert arguments("schedule")[:4] == ["waiting", "running", "cache", "config"]
    assert arguments("sample_with_logprobs") == ["logits", "temperatures", "noise"]
    assert arguments("model_forward") == ["model", "inputs", "cache"]
    assert arguments("compute_block_hash") == ["token_ids", "prefix_hash", "extra"]


def test_errors_are_public_and_share_a_base() -> None:
    error_types = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert error_types <= NAMES
    assert all(issubclass(getattr(errors, name), errors.NanoInferenceError) for name in error_types)


def test_statistics_are_plain_numbers() -> None:
    types = {field.name: field.type for field in dataclasses.fields(EngineStats)}
    assert types.pop("step_microseconds") == Mapping[str, float]
    assert types.pop("ranks_busy") == types.pop("ranks_waiting") == tuple[float, ...]
    assert types.pop("speculation") == SpeculationStats | None
    assert set(types.values()) == {int, float}


def test_version_is_a_release() -> None:
    parts = nano_inference.__version__.split(".")
    assert len(parts) == 3
    assert all(part.isdigit() for part in parts)


def test_repository_tracks_no_links() -> None:
    """A tracked link `.venv` would replace the folder of that name on checkout."""
    process = subprocess.run(
        ["git", "ls-files", "--stage"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    links = [line.split("\t")[1] for line in process.splitlines() if line.startswith("120000")]
    assert not links, f"git rm --cached {' '.join(links)}"

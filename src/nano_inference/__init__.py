"""nano-inference: an LLM inference engine for reinforcement learning.

It takes token ids and returns tokens, exact logprobs and weight versions. You can swap the policy's
weights while it decodes.
"""

import os
from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy
from nano_inference.system.moved import report_moves as _report_moves
from nano_inference.system.processor import vendor as _vendor
from nano_inference.system.version import __version__ as __version__

if TYPE_CHECKING:
    from nano_inference.checkpoints.lora import LoraSettings
    from nano_inference.config import EngineConfig, SchedulerConfig
    from nano_inference.core.decision import SchedulerOutput
    from nano_inference.core.schedule import schedule
    from nano_inference.core.sequence import Sequence, SequenceStatus
    from nano_inference.engine.async_engine import AsyncInferenceEngine
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.errors import (
        AdapterError,
        AdapterNotFound,
        ConfigError,
        EngineDead,
        InvalidRequest,
        LacksMemory,
        LacksMemoryToWake,
        ModelLoadError,
        NanoInferenceError,
        RankLost,
        RequestAborted,
        RequestTooLarge,
        TemplateRewritesPast,
        VersionGone,
        WeightTransferError,
        WeightUpdateConflict,
        WeightUpdateError,
    )
    from nano_inference.kv_cache.block_hash import compute_block_hash
    from nano_inference.kv_cache.block_pool import Block
    from nano_inference.kv_cache.hash_cache import PagedKVCache
    from nano_inference.kv_cache.manager import CacheAllocation, KVCacheManager
    from nano_inference.kv_cache.radix import RadixKVCache
    from nano_inference.models.decoder import model_forward
    from nano_inference.sampling.pipeline import SamplingPipeline
    from nano_inference.sampling.sample import sample_with_logprobs
    from nano_inference.structured.grammar import Grammar
    from nano_inference.text.conversation import Conversation, TokenSpan
    from nano_inference.types import (
        AdapterInfo,
        ContextVersions,
        Delta,
        EngineStats,
        LogprobMatrix,
        Receipt,
        RoutedExperts,
        SamplingMask,
        SamplingParams,
        TopLogprobs,
        TrainingSample,
        VersionSpan,
    )
    from nano_inference.weights.staging import WeightPatch
    from nano_inference.weights.sync import WeightSyncManager
    from nano_inference.weights.update import WeightUpdate

_report_moves()

# MKL computes torch's products on x86 and reads this variable before its first product. On Intel
# processors the setting gives the same bits with any number of threads: without it, MKL splits long
# sums between threads. On AMD processors it does the opposite: it makes the rounding of narrow
# products depend on the number of threads.
if _vendor() == "intel":
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Every name is loaded on first access, because `nano-inference --help` should not wait for all.
_MODULES = {
    "AdapterError": "errors",
    "AdapterInfo": "types",
    "AdapterNotFound": "errors",
    "AsyncInferenceEngine": "engine.async_engine",
    "Block": "kv_cache.block_pool",
    "CacheAllocation": "kv_cache.manager",
    "ConfigError": "errors",
    "ContextVersions": "types",
    "Conversation": "text.conversation",
    "Delta": "types",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "EngineStats": "types",
    "Grammar": "structured.grammar",
    "InferenceEngine": "engine.engine",
    "InvalidRequest": "errors",
    "LacksMemory": "errors",
    "LacksMemoryToWake": "errors",
    "KVCacheManager": "kv_cache.manager",
    "LogprobMatrix": "types",
    "LoraSettings": "checkpoints.lora",
    "ModelLoadError": "errors",
    "NanoInferenceError": "errors",
    "PagedKVCache": "kv_cache.hash_cache",
    "RadixKVCache": "kv_cache.radix",
    "RankLost": "errors",
    "RequestAborted": "errors",
    "RequestTooLarge": "errors",
    "Receipt": "types",
    "RoutedExperts": "types",
    "SamplingMask": "types",
    "SamplingParams": "types",
    "SamplingPipeline": "sampling.pipeline",
    "SchedulerConfig": "config",
    "SchedulerOutput": "core.decision",
    "Sequence": "core.sequence",
    "SequenceStatus": "core.sequence",
    "TemplateRewritesPast": "errors",
    "TokenSpan": "text.conversation",
    "TopLogprobs": "types",
    "TrainingSample": "types",
    "VersionGone": "errors",
    "VersionSpan": "types",
    "WeightPatch": "weights.staging",
    "WeightSyncManager": "weights.sync",
    "WeightTransferError": "errors",
    "WeightUpdate": "weights.update",
    "WeightUpdateConflict": "errors",
    "WeightUpdateError": "errors",
    "compute_block_hash": "kv_cache.block_hash",
    "model_forward": "models.decoder",
    "sample_with_logprobs": "sampling.sample",
    "schedule": "core.schedule",
}
__getattr__ = lazy(__name__, _MODULES)

__all__ = [
    "AdapterError",
    "AdapterInfo",
    "AdapterNotFound",
    "AsyncInferenceEngine",
    "Block",
    "CacheAllocation",
    "ConfigError",
    "ContextVersions",
    "Conversation",
    "Delta",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "Grammar",
    "InferenceEngine",
    "InvalidRequest",
    "KVCacheManager",
    "LacksMemory",
    "LacksMemoryToWake",
    "LogprobMatrix",
    "LoraSettings",
    "ModelLoadError",
    "NanoInferenceError",
    "PagedKVCache",
    "RadixKVCache",
    "RankLost",
    "Receipt",
    "RequestAborted",
    "RequestTooLarge",
    "RoutedExperts",
    "SamplingMask",
    "SamplingParams",
    "SamplingPipeline",
    "SchedulerConfig",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
    "TemplateRewritesPast",
    "TokenSpan",
    "TopLogprobs",
    "TrainingSample",
    "VersionGone",
    "VersionSpan",
    "WeightPatch",
    "WeightSyncManager",
    "WeightTransferError",
    "WeightUpdate",
    "WeightUpdateConflict",
    "WeightUpdateError",
    "compute_block_hash",
    "model_forward",
    "sample_with_logprobs",
    "schedule",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

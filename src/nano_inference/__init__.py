"""nano-inference: an LLM inference engine for reinforcement learning.

It takes token ids and returns tokens, exact logprobs and weight versions. You can swap the policy's
weights while it decodes.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.core.decision import SchedulerOutput
from nano_inference.core.schedule import schedule
from nano_inference.core.sequence import Sequence, SequenceStatus
from nano_inference.errors import (
    AdapterError,
    AdapterNotFound,
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    NanoInferenceError,
    RankLost,
    RequestAborted,
    RequestTooLarge,
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
from nano_inference.structured.grammar import Grammar
from nano_inference.system.moved import report_moves as _report_moves
from nano_inference.system.processor import vendor as _vendor
from nano_inference.system.version import __version__ as __version__
from nano_inference.types import (
    AdapterInfo,
    ContextVersions,
    Delta,
    EngineStats,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

if TYPE_CHECKING:
    from nano_inference.checkpoints.lora import LoraSettings
    from nano_inference.engine.async_engine import AsyncInferenceEngine
    from nano_inference.engine.engine import InferenceEngine
    from nano_inference.models.decoder import model_forward
    from nano_inference.sampling.pipeline import SamplingPipeline
    from nano_inference.sampling.sample import sample_with_logprobs
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

# Names whose modules import the model are loaded on first access, because `nano-inference --help`
# should not wait seconds for torch.
_NEEDS_TORCH = {
    "AsyncInferenceEngine": "nano_inference.engine.async_engine",
    "InferenceEngine": "nano_inference.engine.engine",
    "LoraSettings": "nano_inference.checkpoints.lora",
    "SamplingPipeline": "nano_inference.sampling.pipeline",
    "WeightSyncManager": "nano_inference.weights.sync",
    "WeightPatch": "nano_inference.weights.staging",
    "WeightUpdate": "nano_inference.weights.update",
    "model_forward": "nano_inference.models.decoder",
    "sample_with_logprobs": "nano_inference.sampling.sample",
}

__all__ = [
    "AdapterError",
    "AdapterInfo",
    "AdapterNotFound",
    "AsyncInferenceEngine",
    "Block",
    "CacheAllocation",
    "ConfigError",
    "ContextVersions",
    "Delta",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "Grammar",
    "InferenceEngine",
    "InvalidRequest",
    "KVCacheManager",
    "LoraSettings",
    "ModelLoadError",
    "NanoInferenceError",
    "PagedKVCache",
    "RadixKVCache",
    "RankLost",
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


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_NEEDS_TORCH[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

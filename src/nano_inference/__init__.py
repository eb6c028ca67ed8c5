"""nano-inference: an LLM inference engine for reinforcement learning.

Token ids in; tokens, exact logprobs and weight versions out; policy weights swapped in while it decodes.
"""

from nano_inference.config import EngineConfig, SchedulerConfig
from nano_inference.engine.async_engine import AsyncInferenceEngine
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.weight_sync import WeightSyncManager, WeightUpdate
from nano_inference.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    NanoInferenceError,
    RequestTooLarge,
    WeightUpdateError,
)
from nano_inference.kv_cache.block_hash import compute_block_hash
from nano_inference.kv_cache.block_pool import Block
from nano_inference.kv_cache.manager import CacheAllocation, KVCacheManager
from nano_inference.kv_cache.paged import PagedKVCache
from nano_inference.kv_cache.radix import RadixKVCache
from nano_inference.models.decoder import model_forward
from nano_inference.sampling.pipeline import SamplingPipeline
from nano_inference.sampling.sample import sample_with_logprobs
from nano_inference.scheduling.decision import SchedulerOutput
from nano_inference.scheduling.schedule import schedule
from nano_inference.scheduling.sequence import Sequence, SequenceStatus
from nano_inference.types import (
    Delta,
    EngineStats,
    SamplingMask,
    SamplingParams,
    TopLogprobs,
    TrainingSample,
    VersionSpan,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncInferenceEngine",
    "Block",
    "CacheAllocation",
    "ConfigError",
    "Delta",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "InferenceEngine",
    "InvalidRequest",
    "KVCacheManager",
    "ModelLoadError",
    "NanoInferenceError",
    "PagedKVCache",
    "RadixKVCache",
    "RequestTooLarge",
    "SamplingMask",
    "SamplingParams",
    "SamplingPipeline",
    "SchedulerConfig",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
    "TopLogprobs",
    "TrainingSample",
    "VersionSpan",
    "WeightSyncManager",
    "WeightUpdate",
    "WeightUpdateError",
    "compute_block_hash",
    "model_forward",
    "sample_with_logprobs",
    "schedule",
]

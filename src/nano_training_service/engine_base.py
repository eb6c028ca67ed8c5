"""`EngineBase`: an engine of this process, and LoRA policies on it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nano_inference import AsyncInferenceEngine, InferenceEngine, LoraSettings
from nano_inference.checkpoints import targets_of
from nano_inference.config import EngineConfig, with_plain_weights
from nano_inference.rl import LoraPolicy
from nano_inference.types import SamplingParams, TrainingSample
from nano_training_service.base import ALPHA, Adapter, Policy
from nano_training_service.config import TrainServiceConfig


class EngineBase:
    """An engine as the service's `Base`. Raises `NanoInferenceError` if it cannot be built."""

    def __init__(self, config: EngineConfig, service: TrainServiceConfig) -> None:
        config = with_plain_weights(config)
        config = replace(config, max_loras=service.max_samplers, max_lora_rank=service.max_rank)
        self._engine = AsyncInferenceEngine(config)
        self._recompute = service.recompute_activations
        engine = self._engine.engine
        self.model = config.model_path
        self.folder = str(engine.model_folder)
        self.architecture = engine.spec.architecture
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.spec.vocab_size

    def new_policy(self, name: str, adapter: Adapter) -> Policy:
        """Return a new adapter with initial values."""
        engine = self._engine.engine
        settings = LoraSettings(
            rank=adapter.rank, alpha=ALPHA, targets=_targets(engine, adapter), seed=adapter.seed
        )
        return LoraPolicy(engine, settings, name=name, recompute_activations=self._recompute)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter of a PEFT folder under a new name."""
        self._engine.engine.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter."""
        self._engine.engine.unload_adapter(name)

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, num_samples: int, adapter: str | None
    ) -> list[TrainingSample]:
        """Return samples of one prompt. Cancelling the call aborts them."""
        params = replace(params, adapter=adapter)
        return await self._engine.generate([list(prompt)], params, num_samples)

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.stop()
        self._engine.engine.shutdown()


def _targets(engine: InferenceEngine, adapter: Adapter) -> tuple[str, ...]:
    """Return the kinds of modules to adapt. Anything but attention and the head counts as MLP."""
    kinds: dict[str, None] = {}
    for name, target in targets_of(engine.spec).items():
        is_head, is_attention = name == "lm_head", "attn" in name
        wanted = adapter.unembed if is_head else adapter.attention if is_attention else adapter.mlp
        if wanted:
            kinds[target.kind] = None
    return tuple(kinds)

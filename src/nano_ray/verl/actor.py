"""`NanoServer`: a `RolloutServer` as a Ray actor with the methods that verl calls."""
# pyright: reportMissingImports=false

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, cast

import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from nano_inference import AsyncInferenceEngine
from nano_inference.errors import InvalidRequest
from nano_ray.verl.server import Mode, RolloutServer
from nano_ray.verl.settings import engine_config, request_defaults, require_no_adapter

logger = logging.getLogger(__name__)


class NanoServer(RolloutServer):
    """An engine in its own process. Call `launch_server` before any other method.

    Args:
        config: verl's `RolloutConfig`.
        model_config: verl's `HFModelConfig`, or its OmegaConf form.
        mode: Mode of the replica.
        replica_rank: Number of the replica.
    """

    def __init__(self, config: Any, model_config: Any, mode: str, replica_rank: int) -> None:
        self._config = cast(RolloutConfig, omega_conf_to_dataclass(config))
        self._model = cast(
            HFModelConfig, omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        )
        require_no_adapter(self._model)
        self._engine_config = engine_config(self._config, self._model.local_path, replica_rank)
        self._mode: Mode = cast(Mode, mode)
        self._replica_rank = replica_rank
        # verl identifies replicas by address. Binding reserves this one; nothing listens on it.
        host = ray.util.get_node_ip_address().strip("[]")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.bind((host, 0))
        self._address = host, int(self._socket.getsockname()[1])

    async def launch_server(self) -> None:
        """Load the model. Raises `ModelLoadError` or `ConfigError`."""
        if self._config.profiler is not None and self._config.profiler.enable:
            logger.warning(
                "this rollout has no profiler: rollout.profiler.enable=True profiles only the "
                "trainer."
            )
        engine = await asyncio.to_thread(AsyncInferenceEngine, self._engine_config)
        defaults = request_defaults(self._config, engine.engine.max_model_len, self._replica_rank)
        gives_back = self._config.free_cache_engine
        super().__init__(engine, defaults, mode=self._mode, gives_memory_back=gives_back)

    def get_server_address(self) -> tuple[str, int]:
        """Return the address by which verl identifies replicas. No HTTP server listens on it."""
        return self._address

    def get_rollout_config(self) -> Any:
        """Return verl's `RolloutConfig`."""
        return self._config

    async def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Return one sample. Raises `InvalidRequest` for images, video and audio."""
        if image_data or video_data or audio_data:
            raise InvalidRequest("images, video and audio are not supported; send only token ids.")
        token_ids = normalize_token_ids(prompt_ids)
        return TokenOutput(
            **await super().generate(token_ids, sampling_params, request_id, priority=priority)
        )

    async def start_profile(self, **_: Any) -> None:
        """Do nothing, since there is no profiler."""

    async def stop_profile(self) -> None:
        """Do nothing, since there is no profiler."""

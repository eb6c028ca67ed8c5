"""`Adapters`: LoRA adapters that requests may name."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from nano_inference.remote.temporary import temporary_folder
from nano_inference.server.control.engine import Engine, checked_name
from nano_inference.server.control.updates import require_safetensors
from nano_inference.server.errors import bad_request
from nano_inference.types import AdapterInfo

log = logging.getLogger("nano_inference.server")


class Adapters:
    """Adapters of one engine. They are loaded and unloaded one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patience = engine.config.rl_timeout
        self._turn = asyncio.Lock()  # held while an adapter is loaded or unloaded

    def loaded(self) -> Mapping[str, AdapterInfo]:
        """Return the loaded adapters by name. Does not wait. The mapping is never changed in
        place.
        """
        known = self._engine.known.adapters
        if known is None:
            return {adapter.name: adapter for adapter in self._engine.client.info.adapters}
        return known

    async def load(self, name: str, folder: str, *, again: bool = True) -> AdapterInfo:
        """Load an adapter, or a new version of it, from a PEFT folder on this machine.

        Running requests with an older version follow the policy of the pause, or finish with it if
        there is no pause. Raises a 400 if the adapter does not fit the model, or if it is loaded
        already and `again` is false. Raises a 404 if the folder holds no adapter.
        """
        checked_name(name, "lora_name")
        async with self._turn:
            if not again and name in self.loaded():
                raise bad_request(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    "lora_name",
                )
            return await self._load("load_adapter", name=name, source=folder)

    async def load_file(
        self,
        name: str,
        content: bytes | bytearray,
        config: Mapping[str, Any],
        version: int | None = None,
    ) -> AdapterInfo:
        """Load an adapter from the bytes of a safetensors file and the content of PEFT's
        `adapter_config.json`. `version` must exceed the earlier ones of this name. None: the
        next one.
        """
        checked_name(name, "lora_name")
        require_safetensors(content)
        arguments = {"name": name, "config": dict(config), "version": version}
        async with self._turn, temporary_folder("lora") as folder:
            path = folder / "adapter.safetensors"
            await asyncio.to_thread(path.write_bytes, content)
            return await self._load("load_adapter_file", path=str(path), **arguments)

    async def _load(self, operation: str, *, name: str, **arguments: Any) -> AdapterInfo:
        """Load an adapter. The caller holds the lock of adapters."""
        arguments |= {"name": name, "kv_policy": self._engine.known.pause_policy or "finish_old"}
        info: AdapterInfo = await self._engine.call(operation, self._patience, **arguments)
        self._engine.known.adapters = {**self.loaded(), name: info}
        log.info("version %d of adapter %r is loaded.", info.version, name)
        return info

    async def unload(self, name: str) -> None:
        """Unload an adapter. Running requests finish with it. Raises a 404 if it is not loaded."""
        checked_name(name, "lora_name")
        async with self._turn:
            await self._engine.call("unload_adapter", self._patience, name=name)
            self._engine.known.adapters = {
                key: each for key, each in self.loaded().items() if key != name
            }

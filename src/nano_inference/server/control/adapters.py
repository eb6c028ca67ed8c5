"""`Adapters`: the LoRA adapters that requests may name."""

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
    """One adapter is loaded or unloaded at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patience = engine.config.rl_timeout
        self._turn = asyncio.Lock()  # held while an adapter is loaded or unloaded

    def loaded(self) -> Mapping[str, AdapterInfo]:
        """Those that requests may ask for, by name. No waiting, and never changed in place."""
        own = self._engine.known.adapters
        if own is None:
            return {each.name: each for each in self._engine.client.info.adapters}
        return own

    async def load(self, name: str, folder: str, *, again: bool = True) -> AdapterInfo:
        """Serve an adapter, or a new version of it, from a PEFT folder on this machine. Requests
        that run with an older version do what the pause asked for, and finish with it without a
        pause.

        `again`: one of this name may be loaded already; else that is a 400. 400 also for one that
        does not fit the model, 404 where the folder holds none.
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
        """As `load`, of the bytes of a safetensors file and what PEFT's `adapter_config.json` says.
        `version`: a number above those of this name; None counts up.
        """
        checked_name(name, "lora_name")
        require_safetensors(content)
        told = {"name": name, "config": dict(config), "version": version}
        async with self._turn, temporary_folder("lora") as folder:
            path = folder / "adapter.safetensors"
            await asyncio.to_thread(path.write_bytes, content)
            return await self._load("load_adapter_file", path=str(path), **told)

    async def _load(self, operation: str, *, name: str, **told: Any) -> AdapterInfo:
        """Ask for it in the turn of adapters."""
        told |= {"name": name, "kv_policy": self._engine.known.pause_policy or "finish_old"}
        info: AdapterInfo = await self._engine.call(operation, self._patience, **told)
        self._engine.known.adapters = {**self.loaded(), name: info}
        log.info("version %d of adapter %r serves.", info.version, name)
        return info

    async def unload(self, name: str) -> None:
        """No new request may ask for an adapter; those that have it finish with it. 404 for one
        that is not loaded.
        """
        checked_name(name, "lora_name")
        async with self._turn:
            await self._engine.call("unload_adapter", self._patience, name=name)
            self._engine.known.adapters = {
                key: each for key, each in self.loaded().items() if key != name
            }

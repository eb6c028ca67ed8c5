"""`Checksums`: checks of the weights that serve."""

from collections.abc import Mapping
from typing import Any

from nano_inference.server.control.engine import Engine
from nano_inference.server.errors import ApiError


class Checksums:
    """Checksums and first rows of the tensors that serve."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patience = engine.config.rl_timeout

    async def get(self) -> dict[str, str]:
        """SHA-256 of every tensor that serves, by checkpoint name."""
        return await self._engine.call("weights_checksum", self._patience)

    async def remember(self) -> None:
        """Take those that serve now as what `changed_tensors` compares with."""
        checksums = await self.get()
        self._engine.known.checksums = checksums

    async def changed_tensors(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Names of tensors that differ from checksums: given ones, or those remembered (409
        without).
        """
        before = self._engine.known.checksums if baseline is None else baseline
        if before is None:
            raise ApiError(409, "there is nothing to compare with; take a snapshot first.")
        now = await self.get()
        return sorted(
            name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
        )

    async def rows(self, name: str, count: int) -> list[Any]:
        """The first rows of a checkpoint tensor that serves, as lists of numbers. 400 for a name
        that there is none of, and for more than a million numbers.
        """
        return await self._engine.call("weight_rows", self._patience, tensor=name, count=count)

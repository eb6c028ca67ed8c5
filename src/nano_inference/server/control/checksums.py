"""`Checksums`: checks of the served weights."""

from collections.abc import Mapping
from typing import Any

from nano_inference.server.control.engine import Engine
from nano_inference.server.errors import ApiError


class Checksums:
    """Checksums and first rows of the served tensors."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patience = engine.config.rl_timeout

    async def get(self) -> dict[str, str]:
        """Return the SHA-256 of every served tensor, by checkpoint name."""
        return await self._engine.call("weights_checksum", self._patience)

    async def remember(self) -> None:
        """Store the current checksums for `changed_tensors` to compare with."""
        checksums = await self.get()
        self._engine.known.checksums = checksums

    async def changed_tensors(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Return the names of tensors that differ from `baseline`, or from stored checksums. Raises
        a 409 if there is neither.
        """
        before = self._engine.known.checksums if baseline is None else baseline
        if before is None:
            raise ApiError(409, "there is no snapshot to compare with; take a snapshot first.")
        now = await self.get()
        return sorted(
            name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
        )

    async def rows(self, name: str, count: int) -> list[Any]:
        """Return the first rows of a served tensor as lists of numbers. Raises a 400 for an unknown
        checkpoint name, and for more than a million numbers.
        """
        return await self._engine.call("weight_rows", self._patience, tensor=name, count=count)

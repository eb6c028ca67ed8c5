"""The gate between verl's requests and the engine, closed during weight updates."""

import asyncio


class Gate:
    """A gate that admits, parks or rejects requests, for one event loop."""

    def __init__(self) -> None:
        self.is_open = True
        self._rejects = False
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Wait until the gate is open. Return False if it rejects requests, including parked ones.

        There is no timeout, since verl both closes and opens the gate. The gate cannot close
        between the return and the caller's next `await`.
        """
        while not self.is_open:
            if self._rejects:
                return False
            await self._changed.wait()
        return True

    def close(self, *, reject: bool) -> None:
        """Park new requests, or reject them and the parked ones. Each call sets the mode."""
        self._change(is_open=False, rejects=reject)

    def open(self) -> None:
        """Admit all requests."""
        self._change(is_open=True, rejects=False)

    def _change(self, *, is_open: bool, rejects: bool) -> None:
        self.is_open, self._rejects = is_open, rejects
        self._changed.set()
        self._changed = asyncio.Event()

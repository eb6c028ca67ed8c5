"""The gate between verl's requests and the engine: closed while weights change hands."""

import asyncio


class Gate:
    """Lets requests in, parks them, or turns them away. Of one event loop."""

    def __init__(self) -> None:
        self.is_open = True
        self._rejects = False
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Wait until it is open; False: it turns requests away, those too that were parked before
        it did.

        There is no deadline: verl closes the gate, and verl opens it. Between the answer and the
        caller's next `await` nothing can close it.
        """
        while not self.is_open:
            if self._rejects:
                return False
            await self._changed.wait()
        return True

    def close(self, *, reject: bool) -> None:
        """Park who comes, or turn them away. Each call says anew which."""
        self._change(is_open=False, rejects=reject)

    def open(self) -> None:
        """Let all in."""
        self._change(is_open=True, rejects=False)

    def _change(self, *, is_open: bool, rejects: bool) -> None:
        self.is_open, self._rejects = is_open, rejects
        self._changed.set()
        self._changed = asyncio.Event()

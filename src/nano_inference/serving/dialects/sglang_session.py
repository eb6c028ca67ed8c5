"""Which of SGLang's update requests belong together, although not every trainer says so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Unpack

from nano_inference.serving.control import Checks, Control
from nano_inference.serving.errors import ApiError, bad_request

_CHECKS: Checks = {"complete": False, "check_finite": True}  # unless an update says otherwise


class UpdateSession:
    """Requests are gathered into one update of `Control`'s, which takes effect as a whole.

    Miles says where an update begins and ends. slime and AReaL pause, send their weights in as many
    requests as they have buckets, and continue: between the two, requests are gathered. Outside of
    a pause each is an update of its own, and so is one that says that it is whole.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._is_open = False  # by a request of this dialect's, and nobody has ended it since
        self._is_explicit = False  # by `begin`: it ends by `end`
        self._checks = _CHECKS  # that the update began with
        self._turn = asyncio.Lock()

    @property
    def _is_ours(self) -> bool:
        return self._is_open and self._control.session_open

    async def begin(self, **checks: Unpack[Checks]) -> None:
        """From now on requests are gathered, until `end`. 409 if an update is open. Checks:
        `Control.begin_update`.
        """
        async with self._turn:
            await self._open(checks, explicit=True)

    async def take(
        self,
        receive: Callable[[], Awaitable[None]],
        version: str | None,
        *,
        whole: bool,
        checks: Checks,
    ) -> bool:
        """Take a request's weights; returns whether they serve now. What fails ends the update.

        Args:
            receive: takes them in.
            version: the name of what is gathered; None: nothing is said of it.
            whole: they are all of the update, unless `begin` was called.
            checks: of the update, as far as the request says it. 400 where its first request has
                said otherwise.
        """
        async with self._turn:
            whole = whole or not await self._control.is_paused()
            if not self._is_ours:
                await self._open(checks, explicit=False)
            try:
                self._require_same(checks)
                if version is not None:
                    await self._control.name_version(version)
                await receive()
            except BaseException as problem:
                await self._control.fail_update(problem)
                raise
            if self._is_explicit or not whole:
                return False
            await self._finish()
            return True

    async def end(self) -> str:
        """What was gathered takes effect; returns its version. 409 if nothing is open."""
        async with self._turn:
            if not self._is_ours:
                raise ApiError(409, "no weight update is open; call /begin_weight_update first.")
            return await self._finish()

    async def commit(self) -> bool:
        """What was gathered without a `begin` takes effect; returns whether there was something."""
        async with self._turn:
            if not self._is_ours or self._is_explicit:
                return False
            await self._finish()
            return True

    async def cancel(self, reason: str) -> None:
        """Forget what was gathered, and what is still coming."""
        if self._is_ours:
            await self._control.cancel_update(reason)

    async def fail(self, problem: BaseException) -> None:
        """A request of the update was refused: what it had to bring is missing, so what was
        gathered is forgotten.
        """
        if self._is_ours:
            await self._control.fail_update(problem)

    async def _open(self, checks: Checks, *, explicit: bool) -> None:
        await self._control.begin_update(**checks)
        self._is_open, self._is_explicit, self._checks = True, explicit, {**_CHECKS, **checks}

    def _require_same(self, checks: Checks) -> None:
        for name, value in checks.items():
            if self._checks[name] != value:
                said = (
                    f"{name}={value} comes too late: this update began with "
                    f"{self._checks[name]}; say it at first."
                )
                raise bad_request(said, name)

    async def _finish(self) -> str:
        self._is_open = False
        return await self._control.finish_update()

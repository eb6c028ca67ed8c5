"""`WeightCalls`: the calls of one weight update after the other, in order, each before its
deadline.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nano_inference.errors import NanoInferenceError
from nano_inference.serving.client import EngineClient
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.errors import ApiError, api_error_of, bad_request
from nano_inference.serving.versions import VersionNames

SOON = 60.0  # seconds of calls that wait for a step at most
MARGIN = 10.0  # seconds that the engine gets to say itself that a deadline is past
LATE = 504
SILENT = "engine_silent"
KEEPS_DEADLINE = frozenset(
    (
        "join_group",
        "receive_broadcast",
        "receive_stream",
        "receive_file",
        "receive_folder",
        "finish_update",
    )
)


class WeightCalls:
    """What the API process knows of the engine's weights. It forgets all of it when another engine
    is started.

    Attributes:
        version: what the open session's version will be called, as far as anybody has said.
        snapshot: checksums that somebody asked to remember.
        folder: of which the open session has taken weights.
        served_folder: that the weights which serve came from, in the last update that took any of a
            folder.
    """

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self.version: str | None = None
        self.snapshot: dict[str, str] | None = None
        self.folder: str | None = None
        self.served_folder: str | None = None
        self._client, self._config = client, config
        self._restarts = client.num_restarts  # of the engine that all this is about
        self._versions: VersionNames | None = None  # None: of an engine that was not asked yet
        self._session: int | None = None  # its number
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()  # held by the call that receives or finishes
        self._beginning = asyncio.Lock()
        self._cancelling: set[asyncio.Task[bool]] = set()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def session(self) -> int | None:
        """Number of the open session."""
        self.notice_restart()
        return self._session

    @property
    def names(self) -> VersionNames:
        """Of versions."""
        self.notice_restart()
        if self._versions is None:
            self._versions = VersionNames(self._client.info.weight_version)
        return self._versions

    def notice_restart(self) -> None:
        """A new engine has the weights that it was built with, and knows nothing of groups,
        sessions and names.
        """
        if self._restarts != self._client.num_restarts:
            self._restarts = self._client.num_restarts
            self._versions = self._session = self.version = self.snapshot = self.served_folder = (
                None
            )

    async def call(self, name: str, seconds: float = SOON, **arguments: Any) -> Any:
        """Call the engine; it is told the seconds where it keeps the deadline itself. Raises
        `ApiError`.
        """
        if name in KEEPS_DEADLINE:
            arguments["seconds"] = seconds
        try:
            return await self._client.call(name, timeout=seconds + MARGIN, **arguments)
        except TimeoutError:
            raise ApiError(
                LATE, f"the engine did not answer within {seconds:g} s.", code=SILENT
            ) from None
        except NanoInferenceError as problem:
            raise api_error_of(problem) from problem

    def seconds(self, timeout: float | None) -> float:
        """A deadline as it was asked for, or the server's."""
        seconds = self._config.rl_timeout if timeout is None else timeout
        if not 0 < seconds < float("inf"):
            raise bad_request(
                f"timeout={seconds!r} must be a positive number of seconds.", "timeout"
            )
        return seconds

    # -- sessions ----------------------------------------------------------------------------------

    async def begin(self, version: str | None, **options: bool) -> None:
        """Open a session, when what is left of an earlier one is gone. It ends when nothing is
        heard of it for long.
        """
        number = next(self._numbers)
        async with self._beginning, self._or_cancel(number):
            if self._cancelling:
                await asyncio.wait(self._cancelling, timeout=SOON)
            # It knows whether this one is still open. Another one may be: of a call whose
            # cancelling was lost.
            newest = await self.call("begin_update", session=number, known=self.session, **options)
            self.names.see(newest)
            self._session, self.version, self.folder = number, version, None
        self._expire_later(number)

    @asynccontextmanager
    async def next(self, timeout: float | None = None) -> AsyncIterator[tuple[int, float]]:
        """The next call of the session, alone in it: its number (0 where none is open) and the
        seconds that are left.

        The engine itself refuses what comes outside of a session: it also ends the group of such a
        broadcast.
        """
        seconds = self.seconds(timeout)
        until = time.monotonic() + seconds
        try:
            # wait_for would forget a cancellation that comes with the turn
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise ApiError(
                LATE, f"another call of the weight update did not end within {seconds:g} s."
            ) from None
        try:
            session = self.session
            self._expire_later(None)
            async with self._or_cancel(session):
                yield session or 0, max(round(until - time.monotonic(), 2), 0.01)
            self._expire_later(self._session)
        finally:
            self._turn.release()

    async def receive(self, name: str, timeout: float | None, **arguments: Any) -> Any:
        """A call that is the next of the session."""
        async with self.next(timeout) as (session, seconds):
            return await self.call(name, seconds, session=session, **arguments)

    async def finish(self, session: int, seconds: float, name: str | None, **options: Any) -> str:
        """Close the session; returns the version's name when it serves. Within `next`."""
        names = self.names
        before = names.newest
        # its first tokens come before the answer
        number = names.choose(name if name is not None else self.version)
        try:
            await self.call("finish_update", seconds, session=session, version=number, **options)
        except ApiError as problem:
            if problem.code != SILENT:  # else it may serve
                names.give_back(number, before)
            raise
        self._session = None
        self.served_folder = self.folder or self.served_folder
        return names.name(number)

    async def cancel(self, reason: str) -> bool:
        """Forget the session, also while a call of it is under way."""
        session, self._session = self.session, None
        return session is not None and await self._cancel(session, reason)

    async def fail(self, problem: BaseException) -> None:
        """Forget the session, if one is open, for what went wrong around its calls. It waits unless
        its caller is about to leave.
        """
        if (session := self.session) is not None:
            await self._failed(session, problem)

    def _expire_later(self, session: int | None) -> None:
        """Forget the session unless a call of it comes within the server's deadline; None:
        never.
        """
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if session is not None:
            seconds = self._config.rl_timeout
            self._expiry = asyncio.get_running_loop().call_later(
                seconds, self._expire, session, seconds
            )

    def _expire(self, session: int, seconds: float) -> None:
        if self._session == session:
            self._forget(session, f"nothing was heard of it for {seconds:g} s.")

    def _forget(self, session: int, why: str) -> "asyncio.Task[bool]":
        """Let the engine cancel it, and the next session wait for that."""
        if self._session == session:
            self._session = None
        task = asyncio.create_task(self._cancel(session, why))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
        return task

    @asynccontextmanager
    async def _or_cancel(self, session: int | None) -> AsyncIterator[None]:
        """What fails inside ends the session, also where nobody knows how far the engine has
        come.
        """
        try:
            yield
        except BaseException as problem:
            if session is not None:
                await self._failed(session, problem)
            raise

    async def _failed(self, session: int, problem: BaseException) -> None:
        task = self._forget(
            session, problem.message if isinstance(problem, ApiError) else "its caller left."
        )
        if isinstance(problem, Exception):
            await asyncio.wait([task])

    async def _cancel(self, session: int, reason: str) -> bool:
        text = f"the weight update was cancelled: {reason}"
        try:
            return await self._client.call(
                "cancel_update", timeout=SOON, session=session, reason=text
            )
        except Exception:  # the engine is gone, and the session with it
            return False

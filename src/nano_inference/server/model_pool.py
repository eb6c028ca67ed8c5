"""`ModelPool`: the models of a server, of which some are loaded. A request names its model, and
waits while the model is loaded.

`room_for` decides what a load must unload first. Loads and unloads run one after another, in the
order in which requests asked for them, because each changes the memory that the next one finds. A
model with requests is never unloaded: it gets no new ones, and leaves after the last. Its next
requests load it again, so that no model waits forever for its turn.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from nano_inference.errors import EngineDead, LacksMemory
from nano_inference.remote.messages import EngineInfo
from nano_inference.remote.tasks import start_task
from nano_inference.server.api.openai.kept_responses import KeptResponses
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import (
    NO_RETRY,
    ApiError,
    api_error_of,
    bad_request,
    is_bug,
    retry_after,
    shown,
)
from nano_inference.server.hosted import Hosted, Lease, ModelSource
from nano_inference.system.machine import free_memory

log = logging.getLogger("nano_inference.server")

# as llama.cpp's router names them
ModelStatus = Literal["unloaded", "loading", "loaded"]


@dataclass(frozen=True)
class Seat:
    """A loaded model, as `room_for` sees it.

    Attributes:
        name: Name of the model.
        size: Bytes of memory that its end makes free. None: unknown.
        is_busy: True if requests use it.
    """

    name: str
    size: int | None
    is_busy: bool = False


class NoRoom(LacksMemory):
    """A model does not fit, even if all others were unloaded."""


def room_for(
    name: str, needs: int | None, seats: Sequence[Seat], limit: int, free: int
) -> Seat | None:
    """Return the loaded model that must be unloaded before another is loaded, or None if there is
    room: the least recently used one without requests, else the least recently used one.

    Args:
        name: Model to load.
        needs: Bytes that it needs at least. None: unknown.
        seats: Loaded models, the least recently used first.
        limit: Maximum number of loaded models.
        free: Bytes of free memory.

    Raises:
        NoRoom: The model does not fit even without all others.
    """
    sizes = [seat.size for seat in seats]
    if (
        needs is not None
        and None not in sizes
        and needs > free + sum(map(int, filter(None, sizes)))
    ):
        loaded = " and ".join(f"{seat.name} ({_told(seat.size)})" for seat in seats)
        more = f", and unloading {loaded} would not free enough" if loaded else ""
        raise NoRoom(
            f"the model {name} needs {_told(needs)} of memory, of which {_told(free)} are free"
            f"{more}; use a smaller model or quantization, or lower kv_cache_memory."
        )
    if len(seats) < limit and (needs is None or needs <= free):
        return None
    return next((seat for seat in seats if not seat.is_busy), seats[0])


def _told(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


@dataclass(eq=False)
class PooledModel:
    """One model of the pool.

    Attributes:
        source: The model.
        hosted: Its engine, from the start of its load to its end. None: it is not loaded.
        info: Properties of its last engine. None: it was never loaded.
        failure: Reason why its last engine could not be built, or died. None: it did not.
        load_task: Task that is loading it, or waits for its turn.
        waiters: Requests that wait for it.
        expiry: Timer that unloads it, while no request uses it.
    """

    source: ModelSource
    hosted: Hosted | None = None
    info: EngineInfo | None = None
    failure: str | None = None
    load_task: "asyncio.Task[None] | None" = None
    waiters: "list[asyncio.Future[Lease]]" = field(default_factory=list["asyncio.Future[Lease]"])
    expiry: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        loaded = () if self.info is None else (self.info.model_path,)
        return (*self.source.names, *loaded, self.source.path)[0]

    @property
    def can_serve(self) -> bool:
        """True if a request can use the model now."""
        return self.hosted is not None and self.hosted.can_serve

    @property
    def status(self) -> ModelStatus:
        """State of the model in a word."""
        if self.hosted is None or self.hosted.is_closed:
            return "unloaded"
        return "loaded" if self.hosted.lifecycle.is_ready else "loading"

    @property
    def expires_in(self) -> float:
        """Seconds until the idle model is unloaded. Infinite: it stays."""
        if self.expiry is None:
            return math.inf if self.hosted is None else self.hosted.idle_seconds
        return max(0.0, self.expiry.when() - asyncio.get_running_loop().time())


class ModelPool:
    """Models of one server. All of its code runs on one event loop.

    A single model without `idle_unload` stays loaded: its engine exists from the beginning, and the
    server ends with it. Any other pool outlives all its engines.

    Args:
        config: Configuration of the server.
        sources: The models. Their first names differ.
        free: Returns the bytes of free memory.

    Attributes:
        models: The models, in the order of `sources`.
        stays_loaded: True for a single model that is never unloaded.
        responses: Stored responses of all models.
    """

    def __init__(
        self,
        config: ServerConfig,
        sources: Sequence[ModelSource],
        free: Callable[[], int] = lambda: free_memory().size,
    ) -> None:
        self.config = config
        self.responses = KeptResponses(config.max_stored_responses)
        self.models = [PooledModel(source) for source in sources]
        self.stays_loaded = len(sources) == 1 and config.idle_unload is None
        self._limit = len(sources) if config.max_loaded is None else config.max_loaded
        self._names = {name: model for model in self.models for name in model.source.names}
        self._order: list[PooledModel] = []  # loaded models, the least recently used first
        self._turn = asyncio.Lock()  # held while a model is loaded or unloaded
        self._free = free
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed: ApiError | None = None
        self.on_ready: Callable[[Hosted], None] = lambda _: None
        if self.stays_loaded:
            self._host(self.models[0])

    # -- looking -----------------------------------------------------------------------------------

    @property
    def only(self) -> Hosted:
        """Engine of the model that stays loaded, for routes that exist only in such a server."""
        hosted = self.models[0].hosted
        assert self.stays_loaded
        assert hosted is not None
        return hosted

    @property
    def loaded(self) -> list[Hosted]:
        """Engines that are ready, the most recently used first."""
        return [
            model.hosted
            for model in reversed(self._order)
            if model.hosted is not None and model.hosted.served is not None
        ]

    @property
    def progress(self) -> str:
        """Progress of the model that is being loaded. Empty: unknown."""
        engines = [model.hosted for model in self.models if model.hosted is not None]
        return next((each.client.loading for each in engines if each.client.loading), "")

    def named(self, name: object, field: str = "model") -> PooledModel:
        """Return the model that a request names. A single model answers to any name, which its
        protocol checks. Raises `ApiError`: 400 without a name, 404 for an unknown one.
        """
        if len(self.models) == 1:
            return self.models[0]
        known = ", ".join(shown(model.name) for model in self.models)
        if name is None:
            raise bad_request(f"{field} is missing; this server has {known}.", field)
        if not isinstance(name, str):
            raise bad_request(f"{field} must be a string, not {shown(name)}.", field)
        if name not in self._names:
            raise ApiError(
                404,
                f"the model {shown(name)} does not exist; this server has {known}.",
                field,
                "model_not_found",
            )
        return self._names[name]

    # -- requests ----------------------------------------------------------------------------------

    async def lease(self, model: PooledModel) -> Lease:
        """Return the use of a model, once it is loaded. Raises `ApiError`."""
        if self._closed is not None:
            raise self._closed
        if self.stays_loaded:  # its own routes and errors say what is wrong with it
            self.only.lifecycle.require_ready()
            return Lease(self.only)
        if model.hosted is not None and model.can_serve:
            return Lease(model.hosted)
        loop = asyncio.get_running_loop()
        waiter, began = loop.create_future(), loop.time()
        model.waiters.append(waiter)
        self._begin(model)
        try:
            lease = await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it arrived together with the cancellation
            raise
        finally:
            if waiter in model.waiters:
                model.waiters.remove(waiter)
            self._give_up(model)
        lease.waited = loop.time() - began
        return lease

    async def load(self, model: PooledModel) -> None:
        """Load a model and return when it can serve. Raises `ApiError`."""
        (await self.lease(model)).release()

    async def unload(self, model: PooledModel) -> None:
        """Unload a model after its last request. Raises `ApiError` 409 if it must stay."""
        if self.stays_loaded:
            raise ApiError(
                409,
                "this server keeps its model loaded; start it with --idle-unload, or with several "
                "models.",
                headers=NO_RETRY,
            )
        async with self._turn:
            if model.hosted is not None:
                await self._end(model, model.hosted)

    # -- loads and unloads -------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the first model, or with `max_loaded` as many as it allows and fit.

        Raises the error of a model that stays loaded. Errors of others are logged, and the next
        request tries again.
        """
        if self.stays_loaded:
            await self.only.start()
            self._ready(self.models[0], self.only)
            return
        count = 1 if self.config.max_loaded is None else self._limit
        log.info(
            "models: %s; at most %d loaded at a time%s; loading %s now, others on demand.",
            ", ".join(model.name for model in self.models),
            self._limit,
            f", each until it is idle for {self.config.idle_unload:g} s"
            if self.config.idle_unload is not None
            else "",
            ", ".join(model.name for model in self.models[:count]),
        )
        for model in self.models[:count]:
            if model is not self.models[0] and not self._fits_beside(model):
                log.info("%s is loaded when a request names it: it does not fit now.", model.name)
                continue
            with suppress(ApiError):  # logged
                await self.load(model)
        self._order.reverse()  # the first model leaves last

    def _fits_beside(self, model: PooledModel) -> bool:
        needs = model.source.needs
        return needs is None or needs <= self._free()

    async def close(self) -> None:
        """End all engines. Waiting requests get a 503."""
        self._closed = ApiError(
            503, "the server is shutting down.", code="draining", headers=retry_after(1.0)
        )
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self.models:
            self._refuse(model, self._closed)
            if model.expiry is not None:
                model.expiry.cancel()
        engines = [model.hosted for model in self.models if model.hosted is not None]
        await asyncio.gather(*(hosted.close() for hosted in engines))

    def _host(self, model: PooledModel) -> Hosted:
        """Make a model's engine, which is not started yet."""
        hosted = Hosted(model.source, self.config, self.responses, partial(self._used, model))
        if not self.stays_loaded:
            hosted.client.watch(partial(self._died, model, hosted), replaced=True)
        model.hosted = hosted
        return hosted

    async def _load(self, model: PooledModel) -> None:
        try:
            async with self._turn:
                while not model.can_serve:
                    await self._make_room(model)
                    try:
                        await self._start(model)
                    except LacksMemory as problem:
                        if not self._order:
                            raise
                        log.info("%s does not fit with other models: %s", model.name, problem)
                        await self._evict(self._seats())
        except Exception as problem:
            model.failure = str(problem)
            log.error("cannot load %s: %s", model.name, problem, exc_info=is_bug(problem))
            self._refuse(model, _load_error(model.name, problem))
        else:
            assert model.hosted is not None
            self._admit(model, model.hosted)
        finally:
            model.load_task = None
            if model.waiters and self._closed is None:  # they came after it was given up
                self._begin(model)

    def _begin(self, model: PooledModel) -> None:
        if model.load_task is None:
            model.load_task = start_task(self._load(model), self._tasks)

    def _give_up(self, model: PooledModel) -> None:
        """Stop to wait for room if no request wants the model any more."""
        if model.load_task is not None and model.hosted is None and not model.waiters:
            model.load_task.cancel()

    async def _start(self, model: PooledModel) -> None:
        log.info("loading %s.", model.name)
        hosted = self._host(model)
        try:
            await hosted.start()
            if hosted.client.why_dead is not None:
                raise EngineDead(hosted.client.why_dead)
        except BaseException:
            model.hosted = None
            await hosted.close()
            raise
        self._ready(model, hosted)

    def _ready(self, model: PooledModel, hosted: Hosted) -> None:
        model.info, model.failure = hosted.client.info, None
        self._order.append(model)
        self.on_ready(hosted)

    def _admit(self, model: PooledModel, hosted: Hosted) -> None:
        """Give the loaded model to the requests that wait for it."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(Lease(hosted))
        self._used(model, hosted)

    def _refuse(self, model: PooledModel, problem: ApiError) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(problem)

    async def _make_room(self, model: PooledModel) -> None:
        while True:
            seats = self._seats()
            victim = room_for(model.name, model.source.needs, seats, self._limit, self._free())
            if victim is None:
                return
            await self._evict(seats, victim)

    def _seats(self) -> list[Seat]:
        return [
            Seat(each.name, hosted.client.info.memory or None, bool(hosted.leases))
            for each in self._order
            if (hosted := each.hosted) is not None
        ]

    async def _evict(self, seats: Sequence[Seat], victim: Seat | None = None) -> None:
        """Unload the victim: by default the model that `room_for` would choose."""
        chosen = victim or next((seat for seat in seats if not seat.is_busy), seats[0])
        model = self._names[chosen.name]
        if model.hosted is not None:
            await self._end(model, model.hosted)

    async def _end(self, model: PooledModel, hosted: Hosted) -> None:
        """Unload a model after its last request. The caller holds the turn."""
        hosted.is_leaving = True
        try:
            await hosted.unused()
        except BaseException:
            hosted.is_leaving = False
            raise
        log.info("unloading %s.", model.name)
        self._forget(model, hosted)
        await hosted.close()

    def _forget(self, model: PooledModel, hosted: Hosted) -> None:
        if model.hosted is hosted:
            model.hosted = None
        if model in self._order:
            self._order.remove(model)
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None

    def _died(self, model: PooledModel, hosted: Hosted) -> None:
        """Forget an engine that died by itself. Its requests fail, and the next one loads it."""
        if hosted.is_closed or not hosted.lifecycle.is_ready:
            return
        model.failure = hosted.client.why_dead
        log.error("the engine of %s has died: %s", model.name, model.failure)
        self._forget(model, hosted)
        start_task(hosted.close(), self._tasks)

    # -- idle models -------------------------------------------------------------------------------

    def _used(self, model: PooledModel, hosted: Hosted) -> None:
        """Note the use of a model. If no request uses it any more, its time to leave begins."""
        if model.hosted is not hosted or model not in self._order:
            return
        self._order.remove(model)
        self._order.append(model)
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None
        if not hosted.leases and not self.stays_loaded and math.isfinite(hosted.idle_seconds):
            model.expiry = asyncio.get_running_loop().call_later(
                hosted.idle_seconds, self._expire, model, hosted
            )

    def _expire(self, model: PooledModel, hosted: Hosted) -> None:
        start_task(self._end_idle(model, hosted), self._tasks)

    async def _end_idle(self, model: PooledModel, hosted: Hosted) -> None:
        expiry = model.expiry
        async with self._turn:
            # a request may have come meanwhile
            if model.hosted is hosted and not hosted.leases and model.expiry is expiry:
                await self._end(model, hosted)


def _load_error(name: str, problem: Exception) -> ApiError:
    """Return the reply to a request whose model could not be loaded. Its text names no path."""
    if isinstance(problem, LacksMemory):
        return ApiError(503, str(problem), code="model_does_not_fit", headers=NO_RETRY)
    if isinstance(problem, ApiError):
        return problem
    kind = type(problem).__name__
    said = api_error_of(problem).message if not is_bug(problem) else f"{kind}; see the server's log"
    return ApiError(
        503,
        f"the model {shown(name)} could not be loaded: {said.rstrip('.')}.",
        code="model_load_failed",
        headers=NO_RETRY,
    )

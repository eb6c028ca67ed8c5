"""`Server`: the state shared by the routes, from listening until the engine has ended. `Exchange`:
one generation over HTTP, which ends when its client disconnects.
"""

import asyncio
import json
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from nano_inference.remote.client import EngineClient
from nano_inference.remote.tasks import start_task
from nano_inference.server import paths
from nano_inference.server.api.shared.detached import Detached
from nano_inference.server.api.shared.fields import check_json
from nano_inference.server.api.shared.generation import Generation, answer, events
from nano_inference.server.api.shared.protocol import ApiProtocol, Builder, Served, affordable
from nano_inference.server.api.shared.sampling import may_ask_for_grammar
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
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
from nano_inference.server.http.admission import Bodies, Status
from nano_inference.server.http.grammar_readers import GrammarReaders
from nano_inference.server.http.metrics import Metrics
from nano_inference.server.http.replies import (
    KEEP_ALIVE,
    EventStream,
    LateReply,
    RequestRecord,
    error_reply,
    json_reply,
    log_access,
    record_of,
    reply_in_pieces,
)
from nano_inference.server.http.tracing import Tracer
from nano_inference.server.model_pool import ModelPool, PooledModel
from nano_inference.server.sessions.store import SessionStore
from nano_inference.structured.grammar import Grammar

log = logging.getLogger("nano_inference.server")
_prompts = logging.getLogger("nano_inference.prompts")


Made = TypeVar("Made")

# seconds that a server without an engine answers 503 before it ends, so that clients notice
LINGER = 10.0
GRAMMAR_SECONDS = 20.0  # CPU seconds to read a request with a grammar
_GLANCE = 0.2  # seconds between checks of the engine


class Lifecycle:
    """State of the server for `/health` and for admission.

    Args:
        pool: Models of the server.

    Attributes:
        is_ready: True once the models of the start are loaded. It stays True if an engine dies.
        is_draining: True if the server is shutting down.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self.is_ready = False
        self.is_draining = False

    @property
    def status(self) -> Status:
        """Status of the server in one word."""
        if self.is_draining:
            return "draining"
        if self._pool.stays_loaded:
            return self._pool.only.lifecycle.status
        if not self.is_ready:
            return "starting"
        stalled = any(hosted.lifecycle.status == "stalled" for hosted in self._pool.loaded)
        return "stalled" if stalled else "ok"

    @property
    def is_lost(self) -> bool:
        """True if the only engine is dead and will not be replaced."""
        return self._pool.stays_loaded and self._pool.only.lifecycle.is_lost

    def require_ready(self) -> None:
        """Raise `ApiError` 503 until the server is ready. Used by all routes except health
        routes.
        """
        if self._pool.stays_loaded:
            self._pool.only.lifecycle.require_ready()
        elif not self.is_ready:
            raise ApiError(
                503, "the first model is being loaded.", code="starting", headers=retry_after(1.0)
            )

    def require_open(self) -> None:
        """Raise `ApiError` 503 if the server accepts no new work."""
        if self.is_draining:
            # Another server with the same name may accept it.
            raise draining()
        if self._pool.stays_loaded:
            self._pool.only.lifecycle.require_alive()


@dataclass
class Server:
    """State shared by the routes.

    Attributes:
        config: Constructor argument.
        sources: Models to serve.
        started: `time.time()` when the server was ready.
        stop: Called when the engine is lost permanently; ends the server.
        exchanges: For each request being read or answered, a function that ends it with an error.
        detached: Tasks of answers that are made without a client.
        generating: Generations that are not answered yet.
        beside: Coroutine functions started when the server is ready, and canceled at the end.
        linger: Seconds between the engine's end and the call of `stop`.
        lost: Reason why the engine is lost.
        url: Address of the server. Empty: it does not listen yet.
    """

    config: ServerConfig
    sources: Sequence[ModelSource]
    started: float = 0.0
    stop: Callable[[], None] | None = None
    exchanges: set[Callable[[ApiError], None]] = field(
        default_factory=set[Callable[[ApiError], None]]
    )
    detached: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    generating: "set[Exchange]" = field(default_factory=lambda: set[Exchange]())
    beside: list[Callable[[], Coroutine[Any, Any, None]]] = field(
        default_factory=list[Callable[[], Coroutine[Any, Any, None]]]
    )
    linger: float = field(default_factory=lambda: LINGER)
    lost: Exception | str | None = None
    url: str = ""

    def __post_init__(self) -> None:
        config = self.config
        self.pool = ModelPool(config, self.sources)
        self.lifecycle = Lifecycle(self.pool)
        self.bodies = Bodies(config.max_pending_bytes, "max_pending_bytes", config.body_timeout)
        self.weight_bodies = Bodies(
            config.rl_max_body_bytes, "rl_max_body_bytes", config.body_timeout
        )
        self.metrics = Metrics(self.engines)
        endpoint = config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)
        self.grammar_readers = GrammarReaders(GRAMMAR_SECONDS)
        self.sessions = SessionStore(config)

    # -- the engine of a server with one model that stays loaded -----------------------------------

    @property
    def client(self) -> EngineClient:
        """Client of the only engine."""
        return self.pool.only.client

    @property
    def control(self) -> Control:
        """Operations of trainers on the only engine."""
        return self.pool.only.control

    def require_served(self) -> Served:
        """Return the only model. Raises `ApiError` 503 before its engine is ready."""
        return served_by(self.pool.only)

    # ----------------------------------------------------------------------------------------------

    def engines(self) -> dict[str, EngineClient]:
        """Return the engines that serve, by model, or the one that will. The last used one is the
        first.
        """
        if self.pool.stays_loaded:
            return {self.metrics.model_name: self.client}
        return {served_by(hosted).name: hosted.client for hosted in self.pool.loaded}

    def answered(self, record: RequestRecord) -> None:
        """Log and count a request that has been answered."""
        log_access(record)
        if record.status >= 400:
            self.metrics.refused(record.status, record.problem, record.model)
        if self.tracer is not None:
            self.tracer.ended(record)

    def drain(self) -> None:
        """Reject new requests and give running ones `drain_timeout` seconds. Called on the event
        loop.
        """
        if self.lifecycle.is_draining:
            return
        self.lifecycle.is_draining = True
        log.info("%s", farewell(len(self.exchanges), self.config.drain_timeout))
        asyncio.get_running_loop().call_later(self.config.drain_timeout, self.end_all)

    def end_all(self) -> None:
        """Abort all requests and calls. Clients and trainers get an error."""
        problem = draining()
        for end in list(self.exchanges):
            end(problem)
        for client in self.engines().values():
            client.end_calls(problem)

    def listens_at(self, url: str) -> None:
        """Record the address on which requests can arrive."""
        self.url = url
        self._announce()

    def _announce(self) -> None:
        """Log the address once the server is ready there: the last line of its start."""
        if self.url and self.lifecycle.is_ready:
            log.info("Ready: %s (page, /docs, OpenAI at /v1)", self.url)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the engines on entry and end them on exit. While they are being built, `/health` is
        answered.
        """
        life = asyncio.create_task(self._live())
        try:
            yield
        finally:
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
            await self.pool.close()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    async def _live(self) -> None:
        try:
            await self.pool.start()
        except Exception as problem:
            log.error("cannot build the engine: %s", problem)
            self.lost = problem
            if self.pool.stays_loaded:
                self.pool.only.lifecycle.failure = str(problem)
            if self.stop is not None:
                self.stop()
            return
        self.started = time.time()
        for model in self.pool.models:
            self.metrics.serve(model.name)
        self.lifecycle.is_ready = True
        self._announce()
        tasks = [asyncio.create_task(start()) for start in self.beside]
        try:
            while not self.lifecycle.is_lost:
                await asyncio.sleep(_GLANCE)
        finally:
            for task in tasks:
                task.cancel()
        if self.lifecycle.is_draining:
            return
        self.lost = self.client.why_dead
        log.error("the engine is gone; the server exits in %g seconds: %s", self.linger, self.lost)
        await asyncio.sleep(self.linger)
        if self.stop is not None:
            self.stop()


def served_by(hosted: Hosted) -> Served:
    """Return the model of an engine. Raises `ApiError` 503 before the engine is ready."""
    if hosted.served is None:
        hosted.lifecycle.require_ready()
    assert hosted.served is not None
    return hosted.served


def draining() -> ApiError:
    """Return the error of requests at the server's end."""
    return ApiError(503, "the server is shutting down.", code="draining", headers=retry_after(1.0))


def farewell(count: int, seconds: float) -> str:
    """Return the log line about shutting down, with the number of running requests."""
    if not count or not seconds:
        return "Shutting down."
    requests = "1 request" if count == 1 else f"{count} requests"
    return (
        f"Shutting down: waiting up to {seconds:g} s for {requests}; press Ctrl-C again to stop "
        "now."
    )


LARGE = 32 * 1024  # bytes; larger bodies are read in a thread, so that other requests do not wait


def generation_route(
    server: Server, protocol: ApiProtocol
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a protocol."""

    async def generate(request: Request) -> Response:
        record = record_of(request.scope)
        try:
            server.lifecycle.require_open()
            if server.pool.stays_loaded:
                server.pool.only.admission.require_room()  # before reading the body
            async with AsyncExitStack() as held:
                body = await held.enter_async_context(whole_body(request, server))
                address = await addressed(body, server, protocol)
                if address.unloads is not None:
                    await server.pool.unload(address.model)
                    return json_reply(200, address.unloads)
                begin = partial(begun, request, server, protocol, body, address.model)
                if address.model.can_serve or server.pool.stays_loaded:
                    return await reply_to(request, await begin())
                return LateReply(
                    lambda: _late(request, begin),
                    refuse=partial(refusal, record=record),
                    failure=protocol.failure,
                    keep_alive=KEEP_ALIVE if address.stream and protocol.keeps_alive else None,
                    held=held.pop_all(),
                )
        except Exception as problem:
            return refusal(problem, record)

    return generate


async def _late(request: Request, begin: Callable[[], Awaitable["Exchange"]]) -> Response:
    return await reply_to(request, await begin())


async def reply_to(request: Request, exchange: "Exchange") -> Response:
    """Return the reply of an exchange: whole, streamed, or its beginning if it is detached."""
    if exchange.detached is not None:
        return await exchange.detach(exchange.detached, request.receive)
    if exchange.is_stream:
        return exchange.stream(request.receive)
    return await exchange.whole(request.receive)


async def begun(
    request: Request, server: Server, protocol: ApiProtocol, body: bytes, model: PooledModel
) -> "Exchange":
    """Return the exchange of a request, once its model is loaded. Raises like `read_request`."""
    record = record_of(request.scope)
    lease = await leased(request, server, model)
    try:
        hosted = lease.hosted
        served = served_by(hosted)
        builder = await _made(
            server,
            body,
            served,
            lambda body, served: protocol.prepare(body, served, record.request_id, record.owner),
            with_grammar=True,
        )
        builder.load_seconds = lease.waited
        builder.asks = affordable(builder.asks, served, builder.names)
        num_samples = sum(ask.num_samples for ask in builder.asks)
        server.lifecycle.require_open()  # it may have changed while the body arrived
        hosted.admission.require_room(num_samples, wanted_version(builder))
        return Exchange(server, lease, builder, record, request.scope)
    except BaseException:
        lease.release()
        raise


async def leased(request: Request, server: Server, model: PooledModel) -> Lease:
    """Return the use of a model, loaded within the rest of `request_timeout`. Raises `ApiError`."""
    if model.can_serve or server.pool.stays_loaded:
        return await server.pool.lease(model)
    seconds = server.config.request_timeout
    limit = asyncio.timeout(seconds - (time.perf_counter() - record_of(request.scope).started))
    problem = ApiError(
        504,
        f"the model {shown(model.name)} could not be loaded within {seconds:g} seconds "
        "(request_timeout).",
        headers=NO_RETRY,
    )

    def end(reason: ApiError) -> None:
        nonlocal problem
        problem = reason
        limit.reschedule(0.0)

    server.exchanges.add(end)
    try:
        async with limit:
            return await server.pool.lease(model)
    except TimeoutError:
        if not limit.expired():
            raise
        raise problem from None
    finally:
        server.exchanges.discard(end)


class _Address(msgspec.Struct):
    model: Any = None
    stream: Any = None


class Address(NamedTuple):
    """Destination of a request: its model, if it asks for a stream, and the reply if it only
    unloads the model.
    """

    model: PooledModel
    stream: bool
    unloads: Mapping[str, Any] | None


async def addressed(body: bytes, server: Server, protocol: ApiProtocol) -> Address:
    """Return the destination of a request. Raises `ApiError` 400 and 404."""
    unloads = protocol.unloading(body)
    if server.pool.stays_loaded and unloads is None:
        return Address(server.pool.models[0], False, None)
    said = await _said(body, server)
    name = protocol.name(said.model) if isinstance(said.model, str) else said.model
    return Address(server.pool.named(name), said.stream is True, unloads)


async def _said(body: bytes, server: Server) -> _Address:
    def read() -> _Address:
        check_json(body, server.config.max_depth, server.config.max_values)
        try:
            return _ADDRESS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise bad_request(f"the body is not valid JSON: {problem}") from None

    return await asyncio.to_thread(read) if len(body) > LARGE else read()


_ADDRESS = msgspec.json.Decoder(_Address)


def wanted_version(builder: Builder) -> int:
    """Return the newest weight version that a request waits for. 0: none."""
    return max(
        (
            ask.limits.get(name) or 0
            for ask in builder.asks
            for name in ("min_version", "exact_version")
        ),
        default=0,
    )


async def read_request(
    request: Request,
    server: Server,
    make: Callable[[bytes, Served], Made],
    *,
    with_grammar: bool = False,
) -> Made:
    """Read a body and return the result of `make`. Raises like `reading`."""
    async with reading(request, server, make, with_grammar=with_grammar) as (made, _):
        return made


@asynccontextmanager
async def reading(
    request: Request,
    server: Server,
    make: Callable[[bytes, Served], Made],
    *,
    with_grammar: bool = False,
    name: Callable[[str], str] = str,
) -> AsyncGenerator[tuple[Made, Lease]]:
    """Read a body and yield the result of `make`, and the use of the model meanwhile.

    Raises the errors of `make`, `whole_body` and `leased`.

    Args:
        request: Request whose body is read.
        server: Server with the limits.
        make: Converts the body. Called on the event loop if the body is small, otherwise in a
            thread.
        with_grammar: True if the body may hold a grammar, which can take long to check.
        name: Returns the served name for the name in a request.
    """
    async with whole_body(request, server) as body:
        model = server.pool.models[0]
        if len(server.pool.models) > 1:
            said = (await _said(body, server)).model
            model = server.pool.named(name(said) if isinstance(said, str) else said)
        lease = await leased(request, server, model)
        try:
            served = served_by(lease.hosted)
            yield await _made(server, body, served, make, with_grammar=with_grammar), lease
        finally:
            lease.release()


async def _made(
    server: Server,
    body: bytes,
    served: Served,
    make: Callable[[bytes, Served], Made],
    *,
    with_grammar: bool,
) -> Made:
    is_large = len(body) > LARGE
    if with_grammar and (
        await asyncio.to_thread(may_ask_for_grammar, body)
        if is_large
        else may_ask_for_grammar(body)
    ):
        return await server.grammar_readers.read(partial(make, body, served), len(body))
    return await asyncio.to_thread(make, body, served) if is_large else make(body, served)


@asynccontextmanager
async def whole_body(request: Request, server: Server) -> AsyncGenerator[bytes]:
    """Yield a request's body, within the limits.

    Raises the errors of `Bodies.read`, `ApiError` 408 if the body takes too long to arrive, and the
    server's error if it ends the request.
    """
    config = server.config
    timeout = config.request_timeout
    bodies = (
        server.weight_bodies
        if config.rl and request.url.path in paths.WITH_WEIGHTS
        else server.bodies
    )
    limit = asyncio.timeout(timeout)
    problem = ApiError(
        408, f"the body did not arrive within {timeout:g} seconds.", headers=NO_RETRY
    )

    def end(reason: ApiError) -> None:
        nonlocal problem
        problem = reason
        limit.reschedule(0.0)

    server.exchanges.add(end)
    is_read = False
    try:
        async with bodies.read(request, limit) as body:
            server.exchanges.discard(end)
            is_read = True
            yield body
    except TimeoutError:
        if is_read or not limit.expired():
            raise
        raise problem from None
    finally:
        server.exchanges.discard(end)


def refusal(problem: Exception, record: RequestRecord) -> Response:
    """Return the reply to an error raised before the reply began."""
    if isinstance(problem, ClientDisconnect):
        problem = ApiError(499, "the client disconnected.")
    error = api_error_of(problem)
    if is_bug(problem):
        log.error("request %s failed", record.request_id, exc_info=problem)
    return error_reply(error, record)


class Exchange:
    """A generation and the client that waits for it. The constructor submits the request.

    It ends early if the client disconnects, after `request_timeout`, or when the server stops
    (`end`). It releases the lease of its model at its end.
    """

    def __init__(
        self, server: Server, lease: Lease, builder: Builder, record: RequestRecord, scope: Scope
    ) -> None:
        hosted = lease.hosted
        served = served_by(hosted)
        self._server = server
        self._lease = lease
        lease.keep_alive = builder.keep_alive
        self._builder = builder
        self._record = record
        self._generation = Generation(builder, served)
        record.model = served.name
        connection: Any = scope["state"].get("connection")
        cut = None if connection is None else connection.abort
        self._generation.submit(hosted.client, record.request_id, record.session, cut)
        # unenforceable parts of a grammar are ignored
        lenient = any(_is_lenient(ask.params.grammar) for ask in builder.asks)
        self._headers = {"x-grammar": "lenient"} if lenient else {}
        if builder.num_truncated:
            self._headers["x-truncated-tokens"] = str(builder.num_truncated)
        self._wanted = wanted_version(builder), len(self._generation.choices)
        hosted.admission.hold(*self._wanted)
        server.exchanges.add(self.end)
        server.generating.add(self)

    @property
    def record(self) -> RequestRecord:
        """Record of the HTTP request."""
        return self._record

    @property
    def names(self) -> set[str | None]:
        """Names by which the engine knows the parts of the request."""
        return {stream.name for stream in self._generation.streams}

    @property
    def detached(self) -> Detached | None:
        """Events of an answer that is made without the client."""
        return self._builder.detached

    @property
    def is_stream(self) -> bool:
        """True if the answer is a stream of events."""
        return self._builder.stream

    def end(self, problem: ApiError) -> None:
        """Abort the generation. The client gets `problem` as a status or as the last event."""
        for stream in self._generation.streams:
            stream.end(problem)

    async def whole(self, receive: Receive) -> Response:
        """Wait for the whole answer."""
        try:
            with self._watched(receive):
                body = await answer(self._generation)
                reply = await reply_in_pieces(body, aside=self._generation.is_large)
                reply.headers.update(self._headers)
                return reply
        except Exception as problem:
            return refusal(problem, self._record)

    def stream(self, receive: Receive) -> Response:
        """Return a response that streams the events."""
        return EventStream(
            cast(AsyncGenerator[bytes, None], events(self._generation)),
            refuse=lambda problem: refusal(problem, self._record),
            failure=lambda problem: self._builder.failure(api_error_of(problem)),
            around=self._watched(receive),
            on_event=partial(self._server.metrics.sent, self._record),
            keep_alive=KEEP_ALIVE if self._builder.keeps_alive else None,
            headers=self._headers | {"content-type": self._builder.media_type},
        )

    async def detach(self, detached: Detached, receive: Receive) -> Response:
        """Generate without the client, and return the beginning of the answer or its events."""
        with ExitStack() as stack:
            stack.enter_context(self._timed())
            try:
                detached.append(self._builder.queued())
            except ApiError as problem:
                return refusal(problem, self._record)
            detached.begin(self.end)
            start_task(self._alone(detached, stack.pop_all()), self._server.detached)
        if self._builder.shows_stream:
            return replayed(detached, 0, receive, self._record)
        return json_reply(200, detached.snapshot())

    async def _alone(self, detached: Detached, timed: ExitStack) -> None:
        last = b""
        with timed:
            try:
                async with aclosing(events(self._generation)) as all_events:
                    async for data in all_events:
                        detached.append(data)
            except Exception as problem:
                if is_bug(problem):
                    log.exception("request %s failed", self._record.request_id)
                last = self._builder.failure(api_error_of(problem))
            finally:
                detached.close(last)

    @contextmanager
    def _watched(self, receive: Receive) -> Iterator[None]:
        watcher = asyncio.get_running_loop().create_task(self._until_disconnected(receive))
        try:
            with self._timed():
                yield
        finally:
            watcher.cancel()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        seconds = self._server.config.request_timeout
        late = ApiError(
            504,
            f"the request took longer than {seconds:g} seconds (request_timeout).",
            headers=NO_RETRY,
        )
        left = max(0.0, seconds - (time.perf_counter() - self._record.started))
        timer = loop.call_later(left, self.end, late)
        try:
            yield
        finally:
            timer.cancel()
            self._generation.close()
            self._builder.ended()
            self._server.exchanges.discard(self.end)
            self._server.generating.discard(self)
            self._lease.hosted.admission.let_go(*self._wanted)
            self._lease.release()
            self._report()

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._record.problem = "client disconnected"
        self._generation.close()

    def _report(self) -> None:
        usage, record = self._generation.usage, self._record
        record.num_samples = len(self._generation.choices)
        record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        record.completion_tokens = usage.completion_tokens
        seconds = time.perf_counter() - record.started
        self._lease.hosted.admission.took(seconds)
        self._server.metrics.ended(record, self._generation, seconds)
        if self._server.config.log_prompts:
            log_texts(self._generation, record.request_id)


def replayed(detached: Detached, number: int, receive: Receive, record: RequestRecord) -> Response:
    """Return a response that streams the events of a detached answer from this number on."""
    reader = detached.reader(number)

    async def until_disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        reader.close()

    @contextmanager
    def watched() -> Iterator[None]:
        watcher = asyncio.get_running_loop().create_task(until_disconnected())
        try:
            yield
        finally:
            watcher.cancel()

    return EventStream(
        reader.events(),
        refuse=lambda problem: refusal(problem, record),
        failure=lambda _: b"",
        around=watched(),
        on_event=lambda: None,
    )


def _is_lenient(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.lenient


def log_texts(generation: Generation, request_id: str) -> None:
    """Log prompts and completions. Called only if `log_prompts` is set."""
    tokenizer = generation.served.tokenizer
    asks = [
        ask.prompt if tokenizer is None else tokenizer.decode(ask.prompt)
        for ask in generation.builder.asks
    ]
    said = [choice.reasoning + choice.content for choice in generation.choices]
    fields = {"request_id": request_id, "prompts": asks, "completions": said}
    _prompts.info("%s", json.dumps(fields), extra={"fields": fields})

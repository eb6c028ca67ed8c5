"""`Server`: the state shared by the routes, from listening until the engine has ended. `Exchange`:
one generation over HTTP, which ends when its client disconnects.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from nano_inference.checkpoints.generation_defaults import AUTO, as_text
from nano_inference.remote.client import EngineClient
from nano_inference.remote.tasks import start_task
from nano_inference.server import paths
from nano_inference.server.api.openai.kept_responses import KeptResponses
from nano_inference.server.api.openai.responses_reasoning import Seal
from nano_inference.server.api.parsing import chat_format
from nano_inference.server.api.shared.detached import Detached
from nano_inference.server.api.shared.generation import Generation, answer, events
from nano_inference.server.api.shared.protocol import ApiProtocol, Builder, Served, affordable
from nano_inference.server.api.shared.sampling import may_ask_for_grammar
from nano_inference.server.config import ServerConfig
from nano_inference.server.control.control import Control
from nano_inference.server.errors import NO_RETRY, ApiError, api_error_of, is_bug, retry_after
from nano_inference.server.http.admission import Admission, Bodies, Readiness
from nano_inference.server.http.grammar_readers import GrammarReaders
from nano_inference.server.http.metrics import Metrics
from nano_inference.server.http.replies import (
    EventStream,
    RequestRecord,
    error_reply,
    json_reply,
    log_access,
    record_of,
    reply_in_pieces,
)
from nano_inference.server.http.tracing import Tracer
from nano_inference.server.sessions.store import SessionStore
from nano_inference.structured.grammar import Grammar
from nano_inference.text.tokenizer import load_tokenizer

log = logging.getLogger("nano_inference.server")
_prompts = logging.getLogger("nano_inference.prompts")


Made = TypeVar("Made")

# seconds that a server without an engine answers 503 before it ends, so that clients notice
LINGER = 10.0
GRAMMAR_SECONDS = 20.0  # CPU seconds to read a request with a grammar
_GLANCE = 0.2  # seconds between checks of the engine


@dataclass
class Server:
    """State shared by the routes.

    Attributes:
        config, client: Constructor arguments.
        served: The served model. None: the engine is not ready yet.
        started: `time.time()` when the engine was ready.
        stop: Called when the engine is lost permanently; ends the server.
        exchanges: For each request being read or answered, a function that ends it with an error.
        detached: Tasks of answers that are made without a client.
        generating: Generations that are not answered yet.
        beside: Coroutine functions started when the engine is ready, and canceled at the end.
        linger: Seconds between the engine's end and the call of `stop`.
        lost: Reason why the engine is lost.
        url: Address of the server. Empty: it does not listen yet.
    """

    config: ServerConfig
    client: EngineClient
    served: Served | None = None
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
        self.lifecycle = Readiness(self.client, self.config.restart_engine)
        config = self.config
        self.bodies = Bodies(config.max_pending_bytes, "max_pending_bytes", config.body_timeout)
        self.weight_bodies = Bodies(
            config.rl_max_body_bytes, "rl_max_body_bytes", config.body_timeout
        )
        self.metrics = Metrics(self.client)
        endpoint = config.otlp_traces_endpoint
        self.tracer = None if endpoint is None else Tracer(endpoint)
        self.control = Control(self.client, self.config)
        self.grammar_readers = GrammarReaders(GRAMMAR_SECONDS)
        self.sessions = SessionStore(config)
        self.admission = Admission(config, self.client, lambda: self.control.engine.names.newest)

    def require_served(self) -> Served:
        """Return the served model. Raises `ApiError` 503 before the engine is ready."""
        if self.served is None:
            self.lifecycle.require_ready()
        assert self.served is not None
        return self.served

    def answered(self, record: RequestRecord) -> None:
        """Log and count a request that has been answered."""
        log_access(record)
        if record.status >= 400:
            self.metrics.refused(record.status, record.problem)
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
        problem = ApiError(
            503, "the server is shutting down.", code="draining", headers=retry_after(1.0)
        )
        for end in list(self.exchanges):
            end(problem)
        self.client.end_calls(problem)

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
        """Start the engine on entry and end it on exit. While it is being built, `/health` is
        answered.
        """
        life = asyncio.create_task(self._live())
        try:
            yield
        finally:
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
            await self.client.close()
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    async def _live(self) -> None:
        try:
            await self.client.start()
            self.served = await asyncio.to_thread(
                serve_what, self.config, self.client, self.control
            )
        except Exception as problem:
            log.error("cannot build the engine: %s", problem)
            self.lost, self.lifecycle.failure = problem, str(problem)
            if self.stop is not None:
                self.stop()
            return
        self.started = time.time()
        self.metrics.serve(self.served.name)
        self.lifecycle.is_ready = True
        log_ready(self.config, self.served)
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


def serve_what(config: ServerConfig, client: EngineClient, control: Control) -> Served:
    """Return the state that request builders need, once the engine is ready."""
    info = client.info
    # without a tokenizer only token ids are served
    folder = info.tokenizer_folder
    tokenizer = None if folder is None else load_tokenizer(Path(folder))
    if tokenizer is not None and config.chat_template is not None:
        tokenizer = replace(tokenizer, chat_template=config.chat_template, tool_template=None)
    templates = [] if tokenizer is None else [tokenizer.chat_template, tokenizer.tool_template]
    template = "\n".join(each for each in templates if each is not None) or None
    return Served(
        name=(*config.served_names, info.model_path)[0],
        engine=info,
        tokenizer=tokenizer,
        chat_format=chat_format(template, config.tool_format, config.reasoning_format),
        config=config,
        other_names=config.served_names[1:],
        version_name=lambda version: control.engine.names.name(version),
        version_number=lambda name: control.engine.names.number(name),
        adapters=control.adapters.loaded,
        responses=KeptResponses(config.max_stored_responses),
        seal=Seal(config.reasoning_key),
    )


def farewell(count: int, seconds: float) -> str:
    """Return the log line about shutting down, with the number of running requests."""
    if not count or not seconds:
        return "Shutting down."
    requests = "1 request" if count == 1 else f"{count} requests"
    return (
        f"Shutting down: waiting up to {seconds:g} s for {requests}; press Ctrl-C again to stop "
        "now."
    )


def log_ready(config: ServerConfig, served: Served) -> None:
    """Log that the engine is ready, with its main limits."""
    info = served.engine
    log.info(
        "serving %s (%s)%s: max_model_len=%d, max_batch_size=%d, max_queued_samples=%d, "
        "request_timeout=%g s.",
        served.name,
        info.numerics,
        "; without a tokenizer, it accepts only token ids, by /v1/completions"
        if served.tokenizer is None
        else "",
        info.max_model_len,
        info.max_batch_size,
        config.max_queued_samples,
        config.request_timeout,
    )
    if _calls_are_unknown(config, served):
        log.info(
            "the chat template does not show this model's format of tool calls: hermes is assumed; "
            "set another one with --tool-format."
        )
    if served.sampling_defaults:
        log.info(
            "default sampling parameters from %s: %s; disable them with --generation-config none.",
            "the model" if config.generation_config == AUTO else config.generation_config,
            as_text(served.sampling_defaults),
        )


def _calls_are_unknown(config: ServerConfig, served: Served) -> bool:
    format, tokenizer = served.chat_format, served.tokenizer
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    unknown = format.tools is None and not format.in_channels
    return has_template and unknown and config.tool_format is None


LARGE = 32 * 1024  # bytes; larger bodies are read in a thread, so that other requests do not wait


def generation_route(
    server: Server, protocol: ApiProtocol
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a protocol."""

    async def generate(request: Request) -> Response:
        record = record_of(request.scope)
        try:
            server.lifecycle.require_open()
            server.admission.require_room()  # before reading the body
            builder = await read_request(
                request,
                server,
                lambda body, served: protocol.prepare(
                    body, served, record.request_id, record.owner
                ),
                with_grammar=True,
            )
            builder.asks = affordable(builder.asks, server.require_served(), builder.names)
            num_samples = sum(ask.num_samples for ask in builder.asks)
            server.lifecycle.require_open()  # it may have changed while the body arrived
            server.admission.require_room(num_samples, wanted_version(builder))
            exchange = Exchange(server, builder, record, request.scope)
        except Exception as problem:
            return refusal(problem, record)
        if builder.detached is not None:
            return await exchange.detach(builder.detached, request.receive)
        if builder.stream:
            return exchange.stream(request.receive)
        return await exchange.whole(request.receive)

    return generate


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
    """Read a body and return the result of `make`.

    Raises the errors of `make` and `Bodies.read`, `ApiError` 408 if the body takes too long to
    arrive, and the server's error if it ends the request.

    Args:
        request: Request whose body is read.
        server: Server with the limits.
        make: Converts the body. Called on the event loop if the body is small, otherwise in a
            thread.
        with_grammar: True if the body may hold a grammar, which can take long to check.
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
    try:
        async with bodies.read(request, limit) as body:
            server.exchanges.discard(end)
            served = server.require_served()
            is_large = len(body) > LARGE
            if with_grammar and (
                await asyncio.to_thread(may_ask_for_grammar, body)
                if is_large
                else may_ask_for_grammar(body)
            ):
                return await server.grammar_readers.read(partial(make, body, served), len(body))
            return await asyncio.to_thread(make, body, served) if is_large else make(body, served)
    except TimeoutError:
        if not limit.expired():
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
    (`end`).
    """

    def __init__(
        self, server: Server, builder: Builder, record: RequestRecord, scope: Scope
    ) -> None:
        served = server.require_served()
        self._server = server
        self._builder = builder
        self._record = record
        self._generation = Generation(builder, served)
        record.model = served.name
        connection: Any = scope["state"].get("connection")
        cut = None if connection is None else connection.abort
        self._generation.submit(server.client, record.request_id, record.session, cut)
        # unenforceable parts of a grammar are ignored
        lenient = any(_is_lenient(ask.params.grammar) for ask in builder.asks)
        self._headers = {"x-grammar": "lenient"} if lenient else {}
        if builder.num_truncated:
            self._headers["x-truncated-tokens"] = str(builder.num_truncated)
        self._wanted = wanted_version(builder), len(self._generation.choices)
        server.admission.hold(*self._wanted)
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
            headers=self._headers,
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
            self._server.admission.let_go(*self._wanted)
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
        self._server.admission.took(seconds)
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

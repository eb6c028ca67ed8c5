"""`Server`: what the routes share, from the moment it listens until its engine has ended; and
`Exchange`: one generation over HTTP, which ends when its client goes away.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from nano_inference.checkpoints.generation_defaults import AUTO, as_text
from nano_inference.remote.client import EngineClient
from nano_inference.server import paths
from nano_inference.server.api.openai.kept_responses import KeptResponses
from nano_inference.server.api.parsing import chat_format
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
    log_access,
    record_of,
    reply_in_pieces,
)
from nano_inference.server.http.tracing import Tracer
from nano_inference.structured.grammar import Grammar
from nano_inference.text.tokenizer import load_tokenizer

log = logging.getLogger("nano_inference.server")
_prompts = logging.getLogger("nano_inference.prompts")


Made = TypeVar("Made")

# seconds that a server without an engine answers 503, so that it is seen to be down, before it ends
LINGER = 10.0
GRAMMAR_SECONDS = 20.0  # of CPU that reading a request with a grammar may take
_GLANCE = 0.2  # seconds between two looks at the engine


@dataclass
class Server:
    """What the routes share.

    Attributes:
        config, client: as given.
        served: None until the engine is ready.
        started: `time.time()` when it was.
        stop: called when the engine is lost for good; ends the server.
        exchanges: for each request whose body is read or which is answered, the function that ends
            it with an error.
        beside: started when the engine is ready, and cancelled at the end.
        linger: seconds between the engine's end and that call.
        lost: why the engine is lost.
        url: where it listens; empty: it does not listen yet.
    """

    config: ServerConfig
    client: EngineClient
    served: Served | None = None
    started: float = 0.0
    stop: Callable[[], None] | None = None
    exchanges: set[Callable[[ApiError], None]] = field(
        default_factory=set[Callable[[ApiError], None]]
    )
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
        self.admission = Admission(config, self.client, lambda: self.control.engine.names.newest)

    def require_served(self) -> Served:
        """What is served. Raises `ApiError` 503 before it is known."""
        if self.served is None:
            self.lifecycle.require_ready()
        assert self.served is not None
        return self.served

    def answered(self, record: RequestRecord) -> None:
        """A request has been answered: for the log and the metrics."""
        log_access(record)
        if record.status >= 400:
            self.metrics.refused(record.status, record.problem)
        if self.tracer is not None:
            self.tracer.ended(record)

    def drain(self) -> None:
        """Take nothing new; what runs gets `drain_timeout` seconds. Called on the server's loop."""
        if self.lifecycle.is_draining:
            return
        self.lifecycle.is_draining = True
        log.info("%s", farewell(len(self.exchanges), self.config.drain_timeout))
        asyncio.get_running_loop().call_later(self.config.drain_timeout, self.end_all)

    def end_all(self) -> None:
        """Abort all that runs; clients are told, and trainers."""
        problem = ApiError(
            503, "the server is shutting down.", code="draining", headers=retry_after(1.0)
        )
        for end in list(self.exchanges):
            end(problem)
        self.client.end_calls(problem)

    def listens_at(self, url: str) -> None:
        """Note the address, from which on requests can arrive."""
        self.url = url
        self._announce()

    def _announce(self) -> None:
        """Log the address when the server can answer there: the last line of its start."""
        if self.url and self.lifecycle.is_ready:
            log.info("Ready: %s (page, /docs, OpenAI at /v1)", self.url)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From before the engine's start to its end. The engine is built meanwhile, and `/health`
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
            log.error("the engine could not be built: %s", problem)
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
        log.error(
            "there is no engine any more; the server ends in %g seconds: %s", self.linger, self.lost
        )
        await asyncio.sleep(self.linger)
        if self.stop is not None:
            self.stop()


def serve_what(config: ServerConfig, client: EngineClient, control: Control) -> Served:
    """What builders need to know, once the engine is ready."""
    info = client.info
    # without a tokenizer token ids are served
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
    )


def farewell(count: int, seconds: float) -> str:
    """The line about the end, with requests that still run."""
    if not count or not seconds:
        return "Shutting down."
    requests = "1 request" if count == 1 else f"{count} requests"
    return (
        f"Shutting down: waiting up to {seconds:g} s for {requests}; press Ctrl-C again to stop "
        "now."
    )


def log_ready(config: ServerConfig, served: Served) -> None:
    """The engine is ready."""
    info = served.engine
    log.info(
        "serving %s (%s)%s: max_model_len=%d, max_batch_size=%d, max_queued_samples=%d, "
        "request_timeout=%g s.",
        served.name,
        info.numerics,
        ", which has no tokenizer: only token ids, by /v1/completions"
        if served.tokenizer is None
        else "",
        info.max_model_len,
        info.max_batch_size,
        config.max_queued_samples,
        config.request_timeout,
    )
    if _calls_are_unknown(config, served):
        log.info(
            "the chat template does not show how this model writes tool calls: they are read as "
            "hermes has them, and other answers are text; --tool-format names another way."
        )
    if served.sampling_defaults:
        log.info(
            "sampling parameters that a request leaves out are as %s recommends: %s; "
            "--generation-config none turns that off.",
            "the model" if config.generation_config == AUTO else config.generation_config,
            as_text(served.sampling_defaults),
        )


def _calls_are_unknown(config: ServerConfig, served: Served) -> bool:
    format, tokenizer = served.chat_format, served.tokenizer
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    unknown = format.tools is None and not format.in_channels
    return has_template and unknown and config.tool_format is None


LARGE = 32 * 1024  # bytes of a body that is read in a thread, so that others do not wait


def generation_route(
    server: Server, protocol: ApiProtocol
) -> Callable[[Request], Awaitable[Response]]:
    """The route of a protocol."""

    async def generate(request: Request) -> Response:
        record = record_of(request.scope)
        try:
            server.lifecycle.require_open()
            server.admission.require_room()  # before anything is read
            builder = await read_request(
                request,
                server,
                lambda body, served: protocol.prepare(body, served, record.request_id),
                with_grammar=True,
            )
            builder.asks = affordable(builder.asks, server.require_served(), builder.names)
            num_samples = sum(ask.num_samples for ask in builder.asks)
            server.lifecycle.require_open()  # it may have changed while the body came
            server.admission.require_room(num_samples, wanted_version(builder))
            exchange = Exchange(server, builder, record, request.scope)
        except Exception as problem:
            return refusal(problem, record)
        if builder.stream:
            return exchange.stream(request.receive)
        return await exchange.whole(request.receive)

    return generate


def wanted_version(builder: Builder) -> int:
    """The newest version of the weights that any of a request waits for; 0: it waits for none."""
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
    """What is made of a body. Raises what `make` and `Bodies.read` do, `ApiError` 408 if the body
    takes too long to arrive, and what the server ends it by.

    Args:
        request: whose body is read.
        server: whose limits hold.
        make: called on the event loop with a small body, else in a thread.
        with_grammar: the body may hold a grammar, whose check may take long.
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

    def end(given: ApiError) -> None:
        nonlocal problem
        problem = given
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
    """The answer to what was raised before an answer began."""
    if isinstance(problem, ClientDisconnect):
        problem = ApiError(499, "the client went away.")
    error = api_error_of(problem)
    if is_bug(problem):
        log.error("request %s failed", record.request_id, exc_info=problem)
    return error_reply(error, record)


class Exchange:
    """A generation and the client that waits for it. Made, it is submitted.

    It ends early when the client goes away, when `request_timeout` is over, or when the server
    stops (`end`).
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
        # what its grammar cannot enforce is passed over
        lenient = any(_is_lenient(ask.params.grammar) for ask in builder.asks)
        self._headers = {"x-grammar": "lenient"} if lenient else {}
        self._wanted = wanted_version(builder), len(self._generation.choices)
        server.admission.hold(*self._wanted)
        server.exchanges.add(self.end)

    def end(self, problem: ApiError) -> None:
        """Abort the generation; the client gets `problem`, as a status or as a last event."""
        for stream in self._generation.streams:
            stream.end(problem)

    async def whole(self, receive: Receive) -> Response:
        """Wait for all of it."""
        try:
            with self._watched(receive):
                body = await answer(self._generation)
                reply = await reply_in_pieces(body, aside=self._generation.is_large)
                reply.headers.update(self._headers)
                return reply
        except Exception as problem:
            return refusal(problem, self._record)

    def stream(self, receive: Receive) -> Response:
        """The events as they come."""
        return EventStream(
            cast(AsyncGenerator[bytes, None], events(self._generation)),
            refuse=lambda problem: refusal(problem, self._record),
            failure=lambda problem: self._builder.failure(api_error_of(problem)),
            around=self._watched(receive),
            on_event=partial(self._server.metrics.sent, self._record),
            headers=self._headers,
        )

    @contextmanager
    def _watched(self, receive: Receive) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        seconds = self._server.config.request_timeout
        late = ApiError(
            504,
            f"the request took more than {seconds:g} seconds (request_timeout).",
            headers=NO_RETRY,
        )
        left = max(0.0, seconds - (time.perf_counter() - self._record.started))
        timer = loop.call_later(left, self.end, late)
        watcher = loop.create_task(self._until_disconnected(receive))
        try:
            yield
        finally:
            timer.cancel()
            watcher.cancel()
            self._generation.close()
            self._server.exchanges.discard(self.end)
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


def _is_lenient(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.lenient


def log_texts(generation: Generation, request_id: str) -> None:
    """What was asked and what was said; only where `log_prompts` is set."""
    tokenizer = generation.served.tokenizer
    asks = [
        ask.prompt if tokenizer is None else tokenizer.decode(ask.prompt)
        for ask in generation.builder.asks
    ]
    said = [choice.reasoning + choice.content for choice in generation.choices]
    fields = {"request_id": request_id, "prompts": asks, "completions": said}
    _prompts.info("%s", json.dumps(fields), extra={"fields": fields})

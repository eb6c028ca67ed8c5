"""One generation over HTTP: read the body, submit it to the engine, answer, and end when the
client goes away.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from nano_inference.serving import paths
from nano_inference.serving.edge.logs import log_texts
from nano_inference.serving.edge.replies import (
    EventStream,
    RequestRecord,
    error_reply,
    record_of,
    reply_in_pieces,
)
from nano_inference.serving.errors import NO_RETRY, ApiError, api_error_of
from nano_inference.serving.handler import Generation, answer, events
from nano_inference.serving.protocols.interface import Builder, Served, affordable
from nano_inference.serving.protocols.requests import ApiProtocol
from nano_inference.serving.server import Server

log = logging.getLogger("nano_inference.serving")

LARGE = 32 * 1024  # bytes of a body that is read in a thread, so that others do not wait

Made = TypeVar("Made")


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
        (max(ask.min_version or 0, ask.exact_version or 0) for ask in builder.asks), default=0
    )


async def read_request(
    request: Request, server: Server, make: Callable[[bytes, Served], Made]
) -> Made:
    """What is made of a body. Raises what `make` and `Bodies.read` do, `ApiError` 408 if the body
    takes too long to arrive, and what the server ends it by.
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
            return (
                await asyncio.to_thread(make, body, served)
                if len(body) > LARGE
                else make(body, served)
            )
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
    if error.status == 500 and not isinstance(problem, ApiError):
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
        try:
            self._generation.submit(server.client, record.request_id, record.session)
        except BaseException:
            self._generation.close()
            raise
        connection: Any = scope["state"].get("connection")
        for stream in self._generation.streams:
            stream.on_overflow = None if connection is None else connection.abort
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
                return await reply_in_pieces(body, aside=self._generation.is_large)
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

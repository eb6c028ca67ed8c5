"""`Generation`: takes a request from its `Ask`s through the engine to its answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from nano_inference.core.budget import IDS_OF_AN_ENTRY
from nano_inference.errors import VersionGone
from nano_inference.remote.client import EngineClient, RequestStream
from nano_inference.server.api.shared.choices import (
    Choice,
    ChoiceDelta,
    TextStyle,
    new_choice,
)
from nano_inference.server.api.shared.protocol import Ask, Builder, RequestUsage, Served
from nano_inference.server.errors import (
    NO_RETRY,
    ApiError,
    api_error_of,
    bad_request,
    is_bug,
    shown,
)
from nano_inference.structured.grammar import REFUSED
from nano_inference.types import (
    ERROR,
    VERSION_GONE,
    Delta,
    TrainingSample,
)

log = logging.getLogger("nano_inference.server")

# Tokens and ids of masks, prompts included. A part of this size takes a while to write with
# logprobs, so others are served in between.
LARGE_ANSWER = 2048


@dataclass
class Generation:
    """One request on its way through the engine. Always close it.

    Attributes:
        builder: Reads and writes the request's protocol.
        served: Served model.
        streams: Streams of deltas, one per prompt.
        choices: Choices, prompt by prompt.
        usage: Tokens so far. Always the same object.
        queued: Seconds that the request waited in the engine before work on it began, the maximum
            of its prompts.
    """

    builder: Builder
    served: Served
    streams: list[RequestStream] = field(default_factory=list[RequestStream])
    choices: list[Choice] = field(default_factory=list[Choice])
    usage: RequestUsage = field(default_factory=lambda: RequestUsage(0, 0, 0))
    queued: float = 0.0
    _first: list[int] = field(default_factory=list[int])  # index of each stream's first choice
    _started: set[int] = field(default_factory=set[int])  # streams that have had a delta

    def submit(
        self,
        client: EngineClient,
        request_id: str | None = None,
        session: str | None = None,
        on_overflow: Callable[[], None] | None = None,
    ) -> None:
        """Queue all asks of the request. Raises `EngineDead`, with none of them queued.
        `on_overflow` is called if the client leaves too many tokens unread.
        """
        try:
            for ask in self.builder.asks:
                self._submit(ask, client, request_id, session, on_overflow)
        except BaseException:
            self.close()
            raise

    def _submit(
        self,
        ask: Ask,
        client: EngineClient,
        request_id: str | None,
        session: str | None,
        on_overflow: Callable[[], None] | None,
    ) -> None:
        if ask.unique and client.is_live(ask.client_id):
            text = (
                f"rid {shown(ask.client_id)} is in use by an unfinished request; give each request "
                "its own."
            )
            raise bad_request(text, "rid")
        self._first.append(len(self.choices))
        params = ask.params
        eos = frozenset[int]() if params.ignore_eos else frozenset(self.served.engine.eos_token_ids)
        stop_ids = params.stop_token_ids | eos
        tokenizer = self.served.tokenizer if ask.detokenize else None
        style, parser = ask.text, self.builder.make_parser
        if parser is not None and parser.marked:
            style = TextStyle(special_tokens=True, stop=style.stop, marked=True)
        elif parser is not None and parser.shown:
            style = TextStyle(style.special_tokens, style.stop, shown=parser.shown)
        for index in range(len(self.choices), len(self.choices) + ask.num_samples):
            choice = new_choice(
                index,
                tokenizer,
                params.stop,
                stop_ids,
                parser,
                style,
                params.min_tokens,
            )
            self.choices.append(choice)
        stream = self.builder.stream and ask.stream
        name = ask.client_id if ask.client_id is not None else request_id
        self.streams.append(
            client.submit(
                ask.prompt,
                ask.params,
                ask.num_samples,
                stream=stream,
                name=name,
                session=session,
                on_overflow=on_overflow,
                **ask.limits,
            )
        )
        self.usage.prompt_tokens += len(ask.prompt)

    @property
    def is_large(self) -> bool:
        """True if the answer takes a while to write."""
        masks = sum(_num_masked(choice.finished) for choice in self.choices)
        return self.usage.prompt_tokens + self.usage.completion_tokens + masks > LARGE_ANSWER

    def close(self) -> None:
        """Abort all unfinished prompts."""
        for stream in self.streams:
            stream.close()

    async def pieces(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """Yield new parts of all choices as they come. Raises the error that ended the request."""
        if len(self.streams) == 1:  # fast path for nearly every request
            stream = self.streams[0]
            while stream.samples_left:
                async for pieces in self._taken(0, await _portions(stream)):
                    yield pieces
            return
        waiting = {
            asyncio.ensure_future(_portions(stream)): number
            for number, stream in enumerate(self.streams)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in sorted(done, key=waiting.__getitem__):
                    number = waiting.pop(future)
                    async for pieces in self._taken(number, future.result()):
                        yield pieces
                    if self.streams[number].samples_left:
                        waiting[asyncio.ensure_future(_portions(self.streams[number]))] = number
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _taken(
        self, number: int, portions: list[list[Delta]]
    ) -> AsyncGenerator[list[ChoiceDelta]]:
        for index, portion in enumerate(portions):
            if index:
                await asyncio.sleep(0)  # lets other requests run
            yield self._pieces(number, portion)

    def _pieces(self, number: int, deltas: list[Delta]) -> list[ChoiceDelta]:
        usage = self.usage
        if number not in self._started:
            self._started.add(number)
            usage.cached_tokens += deltas[0].cached_tokens
            self.queued = max(self.queued, deltas[0].queued)
        first = self._first[number]
        if len(deltas) == 1:
            pieces = [self._push(first + deltas[0].sample_index, deltas)]
        else:
            by_sample: dict[int, list[Delta]] = {}
            for delta in deltas:
                by_sample.setdefault(delta.sample_index, []).append(delta)
            pieces = [self._push(first + index, news) for index, news in by_sample.items()]
        for piece in pieces:
            usage.completion_tokens += len(piece.token_ids)
        return pieces

    def _push(self, index: int, deltas: list[Delta]) -> ChoiceDelta:
        choice = self.choices[index]
        choice.cached_tokens = deltas[-1].cached_tokens
        return self._checked(choice.push(deltas))

    def _checked(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Return a piece, or raise the error of a failed sample."""
        sample = piece.finished
        if sample is not None and sample.finish_reason == "abort":
            reason = str(sample.stop_reason)
            if reason.startswith(ERROR):
                raise _failure(reason.removeprefix(ERROR))
            if sample.stop_reason == VERSION_GONE:  # while it waited
                raise api_error_of(VersionGone(f"{VERSION_GONE} that the request is for."))
        return piece


def _failure(reason: str) -> ApiError:
    """Return the error of a failed sample. The reason names at most a kind of error. A problem of
    the request that only the engine could find is answered like any other.
    """
    if reason.startswith(REFUSED):
        return bad_request(reason.removeprefix(REFUSED))
    log.error("a request failed in the engine: %s", reason)
    said = f"the engine could not continue this request: {reason.rstrip('.')}."
    return ApiError(500, said, code="sample_failed", headers=NO_RETRY)


async def answer(generation: Generation) -> object:
    """Wait for the whole answer, and return its body."""
    async with aclosing(generation.pieces()) as all_pieces:
        async for _ in all_pieces:
            pass
    builder, choices, usage = generation.builder, generation.choices, generation.usage
    if generation.is_large:
        return await asyncio.to_thread(builder.response, choices, usage)
    return builder.response(choices, usage)


async def events(generation: Generation) -> AsyncGenerator[bytes]:
    """Yield the answer as server-sent events. An error before the first event is raised. A later
    one is sent as an event.
    """
    builder, usage, started = generation.builder, generation.usage, False
    chunk = builder.chunk
    try:
        async with aclosing(generation.pieces()) as all_pieces:
            async for pieces in all_pieces:
                head = b"" if started else builder.start(replace(usage, completion_tokens=0))
                if any(
                    each.finished is not None and _num_told(each.finished) > LARGE_ANSWER
                    for each in pieces
                ):
                    data = head + b"".join(
                        [await asyncio.to_thread(chunk, each, usage) for each in pieces]
                    )
                else:
                    data = head + b"".join([chunk(each, usage) for each in pieces])
                started = True
                if data:
                    yield data
        yield builder.end(generation.choices, usage)
    except Exception as problem:
        if not started:
            raise
        error = api_error_of(problem)
        if is_bug(problem):
            log.exception("a stream failed")
        yield builder.failure(error)


async def _portions(stream: RequestStream) -> list[list[Delta]]:
    """Return the new deltas of a request. Many deltas are split by sample, so that other requests
    run in between.
    """
    deltas = await stream.next()
    sizes = (
        len(each.token_ids) if each.finished is None else _num_told(each.finished)
        for each in deltas
    )
    if sum(sizes) <= LARGE_ANSWER:
        return [deltas]
    by_sample: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_sample.setdefault(delta.sample_index, []).append(delta)
    return list(by_sample.values())


def _num_told(sample: TrainingSample) -> int:
    """Return the number of tokens and ids that the answer reports."""
    routed = sample.routed_experts
    return (
        len(sample.completion_tokens)
        + len(sample.prompt_logprobs or ())
        + _num_masked(sample)
        + (0 if routed is None else len(routed.data) // IDS_OF_AN_ENTRY)
    )


def _num_masked(sample: TrainingSample | None) -> int:
    return (
        0 if sample is None or sample.sampling_mask is None else len(sample.sampling_mask.token_ids)
    )

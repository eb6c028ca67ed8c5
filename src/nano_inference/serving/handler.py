"""The one way from a request to its answer, whatever the protocol."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from nano_inference.serving.choices import Choice, Piece, new_choice
from nano_inference.serving.client import EngineClient, RequestStream
from nano_inference.serving.errors import ApiError, api_error_of
from nano_inference.serving.protocols.interface import Builder, Served, Usage
from nano_inference.types import Delta

log = logging.getLogger("nano_inference.serving")


@dataclass
class Generation:
    """One request on its way through the engine. Close it, whatever happens."""

    builder: Builder
    served: Served
    streams: list[RequestStream] = field(default_factory=list[RequestStream])
    choices: list[Choice] = field(default_factory=list[Choice])
    _first: list[int] = field(default_factory=list[int])  # index of each stream's first choice

    def submit(self, client: EngineClient) -> None:
        """Queue all that it asks for. Raises `EngineDead`."""
        for ask in self.builder.asks:
            self._first.append(len(self.choices))
            eos = frozenset() if ask.params.ignore_eos else frozenset(self.served.engine.eos_token_ids)
            for _ in range(ask.num_samples):
                stop_ids = ask.params.stop_token_ids | eos
                self.choices.append(
                    new_choice(
                        len(self.choices), self.served.tokenizer, ask.params.stop, stop_ids, self.builder.make_parser
                    )
                )
            self.streams.append(client.submit(ask.prompt, ask.params, ask.num_samples, stream=self.builder.stream))

    def close(self) -> None:
        """Abort what has not ended."""
        for stream in self.streams:
            stream.close()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        firsts = [self.choices[place] for place in self._first]
        return Usage(
            prompt_tokens=sum(len(ask.prompt) for ask in self.builder.asks),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
        )

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is new, as it comes, of any choice. Raises what ended the request."""
        if len(self.streams) == 1:  # nearly always, and then cheaply
            while self.streams[0].samples_left:
                yield self._pieces(0, await self.streams[0].next())
            return
        waiting = {asyncio.ensure_future(stream.next()): place for place, stream in enumerate(self.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    place = waiting.pop(future)
                    yield self._pieces(place, future.result())
                    if self.streams[place].samples_left:
                        waiting[asyncio.ensure_future(self.streams[place].next())] = place
        finally:
            for future in waiting:
                future.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*waiting, return_exceptions=True)

    def _pieces(self, place: int, deltas: list[Delta]) -> list[Piece]:
        by_sample: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_sample.setdefault(delta.sample_index, []).append(delta)
        first = self._first[place]
        return [self._checked(self.choices[first + index].push(news)) for index, news in by_sample.items()]

    def _checked(self, piece: Piece) -> Piece:
        """Raise what a failed sample says."""
        sample = piece.finished
        if sample is not None and sample.finish_reason == "abort" and str(sample.stop_reason).startswith("error: "):
            log.error("a request failed in the engine: %s", sample.stop_reason)
            raise ApiError(500, "the engine could not go on with this request.")
        return piece


async def answer(generation: Generation) -> dict[str, object]:
    """Wait for all of it; the answer's body."""
    async for _ in generation.pieces():
        pass
    return dict(generation.builder.response(generation.choices, generation.usage))


async def events(generation: Generation) -> AsyncIterator[bytes]:
    """The answer as server-sent events. What goes wrong before the first of them is raised, later it is an event."""
    builder, started = generation.builder, False
    try:
        async for pieces in generation.pieces():
            usage = generation.usage
            data = b"".join([builder.chunk(piece, usage) for piece in pieces])
            if not started:
                data, started = builder.start(usage) + data, True
            if data:
                yield data
        yield builder.end(generation.choices, generation.usage)
    except Exception as problem:
        if not started:
            raise
        error = api_error_of(problem)
        if error.status >= 500:
            log.exception("a stream failed")
        yield builder.failure(error)

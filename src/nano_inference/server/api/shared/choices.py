"""Choices: text, reasoning and tool calls for clients, from the engine's deltas as they come."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nano_inference.server.api.parsing import OutputParser, Parsed, ToolCallDelta
from nano_inference.text.detokenizer import SPECIAL_MARK, Detokenizer, OutputText, special_among
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import Delta, LogprobMatrix, TopLogprobs, TrainingSample


class ChoiceDelta(
    msgspec.Struct, frozen=True, gc=False
):  # created ten times faster than a dataclass
    """New part of one choice. The last one has the finished sample.

    Attributes:
        index: Index of the choice: prompt by prompt, `n` samples each.
        content, reasoning: New text.
        tool_calls: New parts of tool calls.
        token_ids, logprobs, top_logprobs, raw_logprobs, log_kept_mass, token_id_logprobs: New
            tokens, and their values. Text may lag behind them.
        finished: The whole sample.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    raw_logprobs: tuple[float, ...] | None = None
    finished: TrainingSample | None = None
    log_kept_mass: tuple[float, ...] | None = None
    token_id_logprobs: LogprobMatrix | None = None


class TextStyle(msgspec.Struct, frozen=True):
    """Additional parts of a choice's text.

    Attributes:
        special_tokens: Show special tokens by their names.
        stop: Show the stop string that ended the choice, and with `special_tokens` also the id.
        marked: Put `SPECIAL_MARK` before special tokens, for a parser that looks for it.
        shown: Special tokens that are shown in any case, for a parser that looks for them.
    """

    special_tokens: bool = False
    stop: bool = False
    marked: bool = False
    shown: frozenset[str] = frozenset()


PLAIN = TextStyle()


@dataclass(slots=True)
class ToolCall:
    """Received part of a tool call. A broken one is text instead of a call."""

    id: str
    name: str
    arguments: str = ""
    broken: bool = False


@dataclass(slots=True)
class Choice:
    """State of one choice.

    Attributes:
        index: Index of the choice, as in `ChoiceDelta`.
        detokenizer: Makes the text. None if the engine makes it (it searches for stop strings), or
            if no text is wanted.
        parser: Separates reasoning and tool calls from the text. None: all text is content.
        stop_ids: Ids that end the choice, without text.
        shows_stop: True if the text includes the stop string or the id that ended it.
        calls: Tool calls, including broken ones.
        num_tokens: Number of tokens so far.
        cached_tokens: Number of cached tokens of the prompt.
        finished: The whole sample, once it has ended.
        contents, reasonings: Parts of `content` and `reasoning`, as they came.
    """

    index: int
    detokenizer: "Detokenizer | _Searched | None"
    parser: OutputParser | None
    stop_ids: frozenset[int]
    shows_stop: bool = False
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    num_tokens: int = 0
    cached_tokens: int = 0
    finished: TrainingSample | None = None
    contents: list[str] = field(default_factory=list[str])
    reasonings: list[str] = field(default_factory=list[str])

    @property
    def content(self) -> str:
        """Text of the answer so far."""
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        """Text of the reasoning so far."""
        return "".join(self.reasonings)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Tool calls that are not broken."""
        return [call for call in self.calls if not call.broken]

    @property
    def whole(self) -> ChoiceDelta:
        """All tokens of a finished choice as one piece, without text."""
        sample = self.finished
        assert sample is not None
        return ChoiceDelta(
            self.index,
            token_ids=sample.completion_tokens,
            logprobs=sample.logprobs,
            top_logprobs=sample.top_logprobs,
            raw_logprobs=sample.raw_logprobs,
            finished=sample,
            token_id_logprobs=sample.token_id_logprobs,
        )

    def push(self, deltas: Sequence[Delta]) -> ChoiceDelta:
        """Add deltas, and return them as one piece."""
        if len(deltas) == 1 and deltas[0].finished is None:
            return self._piece(deltas[0], deltas[0].text)
        finished = next((delta.finished for delta in deltas if delta.finished is not None), None)
        self.finished = finished
        if (
            finished is not None
            and not self.num_tokens
            and not any(delta.token_ids for delta in deltas)
        ):
            return self._piece(finished, finished.text)  # no stream: the sample holds everything
        return self._piece(_join(deltas), "".join(delta.text or "" for delta in deltas))

    def _piece(self, new: Delta | TrainingSample, text: str | None) -> ChoiceDelta:
        token_ids = new.completion_tokens if isinstance(new, TrainingSample) else new.token_ids
        self.num_tokens += len(token_ids)
        if self.detokenizer is not None:
            text = self._text_of(token_ids, self.detokenizer)
        if self.shows_stop and self.finished is not None:
            text = (text or "") + _stop_string_of(self.finished)
        parsed = self._parsed(text or "") if self.parser is not None else Parsed(text or "")
        if parsed.content:
            self.contents.append(parsed.content)
        return ChoiceDelta(
            self.index,
            parsed.content,
            parsed.reasoning,
            parsed.tool_calls,
            token_ids,
            new.logprobs,
            new.top_logprobs,
            new.raw_logprobs,
            self.finished,
            new.log_kept_mass,
            new.token_id_logprobs,
        )

    def _text_of(self, token_ids: tuple[int, ...], detokenizer: "Detokenizer | _Searched") -> str:
        stop_ids = frozenset[int]() if self.shows_stop else self.stop_ids
        text = detokenizer.push([each for each in token_ids if each not in stop_ids])
        return text + detokenizer.finish() if self.finished is not None else text

    def _parsed(self, text: str) -> Parsed:
        assert self.parser is not None
        parsed = self.parser.push(text)
        if self.finished is not None:
            last = self.parser.finish(cut_off=self.finished.finish_reason != "stop")
            parsed = Parsed(
                parsed.content + last.content,
                parsed.reasoning + last.reasoning,
                _joined(parsed.tool_calls + last.tool_calls),
            )
        if parsed.reasoning:
            self.reasonings.append(parsed.reasoning)
        for call in parsed.tool_calls:
            if call.id is not None:
                self.calls.append(ToolCall(call.id, call.name or ""))
            self.calls[call.index].arguments += call.arguments
            self.calls[call.index].broken |= call.broken
        return parsed


def _join(deltas: Sequence[Delta]) -> Delta:
    """Return the tokens of several deltas, and their values, as one delta."""
    joined: dict[str, Any] = {
        name: tuple(each for delta in deltas for each in getattr(delta, name) or ())
        for name in ("token_ids", "logprobs", "top_logprobs", "raw_logprobs", "log_kept_mass")
    }
    optional = {name: each or None for name, each in joined.items() if name not in _ALWAYS}
    for name in ("token_id_logprobs", "raw_token_id_logprobs"):
        parts = [part for delta in deltas if (part := getattr(delta, name)) is not None]
        optional[name] = LogprobMatrix.joined(parts) if parts else None
    return dataclasses.replace(deltas[0], **joined | optional)


_ALWAYS = ("token_ids", "logprobs")  # the others are None unless the client asks for them


def _stop_string_of(sample: TrainingSample) -> str:
    """Return the stop string that ended a sample, or ""."""
    reason = sample.stop_reason
    return reason if sample.finish_reason == "stop" and isinstance(reason, str) else ""


def _joined(calls: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
    """Merge deltas, so that each call has one."""
    joined: dict[int, ToolCallDelta] = {}
    for call in calls:
        before = joined.get(call.index)
        joined[call.index] = (
            call
            if before is None
            else dataclasses.replace(
                before, arguments=before.arguments + call.arguments, broken=call.broken
            )
        )
    return tuple(joined.values())


class _Searched:
    """Detokenizer that searches for stop strings itself, because its text shows special tokens,
    which the engine's does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        min_tokens: int,
        *,
        skip_special_tokens: bool,
        mark: str,
        shown: frozenset[str],
    ) -> None:
        self._text = OutputText(tokenizer, stop, skip_special_tokens, mark, shown)
        self._tokens_left = min_tokens  # before a stop string counts

    def push(self, token_ids: Sequence[int]) -> str:
        for token_id in token_ids:
            self._text.append(token_id, may_stop=not self._tokens_left)
            self._tokens_left = max(0, self._tokens_left - 1)
        return self._text.take()

    def finish(self) -> str:
        return self._text.finish()


def new_choice(
    index: int,
    tokenizer: Tokenizer | None,
    stop: tuple[str, ...],
    stop_ids: frozenset[int],
    make_parser: Callable[[], OutputParser] | None,
    style: TextStyle = PLAIN,
    min_tokens: int = 0,
) -> Choice:
    """Return a choice that has no tokens yet."""
    detokenizer = None
    if tokenizer is not None:
        mark = SPECIAL_MARK if style.marked else ""
        shown, skip = special_among(style.shown, tokenizer), not style.special_tokens
        if not stop:
            detokenizer = Detokenizer(tokenizer, skip, mark, shown)
        elif style.special_tokens or shown:
            detokenizer = _Searched(
                tokenizer, stop, min_tokens, skip_special_tokens=skip, mark=mark, shown=shown
            )
    parser = make_parser() if make_parser is not None else None
    return Choice(index, detokenizer, parser, stop_ids, style.stop)

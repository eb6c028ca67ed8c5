"""From an engine's deltas to what clients see: text, reasoning and tool calls of each choice, as
they grow.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nano_inference.server.api.parsing import OutputParser, Parsed, ToolCallDelta
from nano_inference.text.detokenizer import SPECIAL_MARK, Detokenizer, OutputText
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import Delta, TopLogprobs, TrainingSample


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):  # a tenth of a dataclass's time to make
    """What is new of one choice. The last one has the finished sample.

    Attributes:
        index: of the choice: prompt by prompt, `n` samples each.
        content, reasoning: new text.
        tool_calls: new pieces of tool calls.
        token_ids, logprobs, top_logprobs, raw_logprobs, log_kept_mass: of the new tokens; text may
            lag behind them.
        finished: the whole sample.
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


class TextStyle(msgspec.Struct, frozen=True):
    """What a choice's text shows beside the text of its tokens.

    Attributes:
        special_tokens: special tokens by their names.
        stop: the stop string that ended it; with `special_tokens` also the id.
        marked: `SPECIAL_MARK` before special tokens, for a parser that goes by them.
    """

    special_tokens: bool = False
    stop: bool = False
    marked: bool = False


PLAIN = TextStyle()


@dataclass(slots=True)
class ToolCall:
    """A tool call, as far as it has come. A broken one is none."""

    id: str
    name: str
    arguments: str = ""
    broken: bool = False


@dataclass(slots=True)
class Choice:
    """All that is known of one choice.

    Attributes:
        index: see `ChoiceDelta`.
        detokenizer: None where the engine makes the text, because it looks for stop strings; or
            where no text is wanted.
        parser: takes reasoning and tool calls out of the text; None: it is all content.
        stop_ids: ids that end it; they have no text.
        shows_stop: its text ends with the stop string, or the id, that ended it.
        calls: of tools, broken ones too.
        contents, reasonings: new text of each, as it came: joined, they are `content` and
            `reasoning`.
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
        """All of it so far."""
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        """All of it so far."""
        return "".join(self.reasonings)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Those that are not broken."""
        return [call for call in self.calls if not call.broken]

    @property
    def whole(self) -> ChoiceDelta:
        """All of its tokens, once it has ended, as one piece; the text is `content`."""
        sample = self.finished
        assert sample is not None
        return ChoiceDelta(
            self.index,
            token_ids=sample.completion_tokens,
            logprobs=sample.logprobs,
            top_logprobs=sample.top_logprobs,
            raw_logprobs=sample.raw_logprobs,
            finished=sample,
        )

    def push(self, deltas: Sequence[Delta]) -> ChoiceDelta:
        """Take in what has come of it; several deltas are one piece."""
        if len(deltas) == 1 and deltas[0].finished is None:
            return self._piece(deltas[0], deltas[0].text)
        finished = next((delta.finished for delta in deltas if delta.finished is not None), None)
        self.finished = finished
        if (
            finished is not None
            and not self.num_tokens
            and not any(delta.token_ids for delta in deltas)
        ):
            return self._piece(finished, finished.text)  # it does not stream: all is in the sample
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
    """The tokens of several, and what is told of them."""
    joined: dict[str, Any] = {
        name: tuple(each for delta in deltas for each in getattr(delta, name) or ())
        for name in ("token_ids", "logprobs", "top_logprobs", "raw_logprobs", "log_kept_mass")
    }
    told = {name: each or None for name, each in joined.items() if name not in _ALWAYS}
    return dataclasses.replace(deltas[0], **joined | told)


_ALWAYS = ("token_ids", "logprobs")  # the others are None unless they are asked for


def _stop_string_of(sample: TrainingSample) -> str:
    """The stop string that ended it, if one did."""
    reason = sample.stop_reason
    return reason if sample.finish_reason == "stop" and isinstance(reason, str) else ""


def _joined(calls: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
    """At most one piece a call."""
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
    """Text that is made here although there are stop strings, because it shows what the engine's
    does not.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int, mark: str
    ) -> None:
        self._text = OutputText(tokenizer, stop, skip_special_tokens=False, mark=mark)
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
    """A choice of which nothing has come."""
    detokenizer = None
    if tokenizer is not None:
        mark = SPECIAL_MARK if style.marked else ""
        if not stop:
            detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=not style.special_tokens, mark=mark
            )
        elif style.special_tokens:
            detokenizer = _Searched(tokenizer, stop, min_tokens, mark)
    parser = make_parser() if make_parser is not None else None
    return Choice(index, detokenizer, parser, stop_ids, style.stop)

"""Streams and whole answers of the same pieces agree, for any pieces."""

import json
import secrets
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.remote.messages import EngineInfo
from nano_inference.server.api.anthropic import answer as anthropic
from nano_inference.server.api.anthropic.answer import MessageBuilder, signature
from nano_inference.server.api.anthropic.models import MessagesRequest
from nano_inference.server.api.parsing import ChatFormat, Parsed, ToolCallDelta
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta
from nano_inference.server.api.shared.protocol import RequestUsage, Served
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import Delta, FinishReason, TrainingSample
from tests.server.api.anthropic.anthropic_stream import accumulated, events_of
from tests.server.scripted import smollm2

ENGINE = EngineInfo("m", None, 100, 300, (2,), 8, "n", 0, 1)


def served(tokenizer: Tokenizer | None = None, **config: Any) -> Served:
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(smollm2())
    return Served("m", ENGINE, tokenizer, ChatFormat(), ServerConfig(**config))


SERVED = served()


def builder(
    prompt: list[int] | None = None, served: Served = SERVED, **fields: Any
) -> MessageBuilder:
    body = {
        "model": "m",
        "max_tokens": 20,
        "messages": [{"role": "user", "content": "hi"}],
    } | fields
    request = MessagesRequest.model_validate(body)
    with mock.patch.object(anthropic, "encode", return_value=prompt or [1] * 9):
        return MessageBuilder(request, served, "req_1")


def sample(
    finish_reason: FinishReason = "stop", stop_reason: int | str | None = 2
) -> TrainingSample:
    return TrainingSample((1,) * 9, (5, 2), (-1.0, -1.0), None, 0, finish_reason, stop_reason)


class Replay:
    """Parser that returns scripted pieces."""

    def __init__(self, pieces: list[ChoiceDelta]) -> None:
        self._parsed = [
            Parsed(piece.content, piece.reasoning, piece.tool_calls) for piece in pieces
        ]

    def push(self, text: str) -> Parsed:
        return self._parsed.pop(0)

    def finish(self, *, cut_off: bool = True) -> Parsed:
        return Parsed()


def choice_of(pieces: list[ChoiceDelta]) -> Choice:
    """Return the server's state after these pieces."""
    choice = Choice(0, None, Replay(pieces), frozenset())
    for piece in pieces:
        choice.push([Delta(0, 0, (5,), (-1.0,), "?", piece.finished)])
    return choice


USAGE = RequestUsage(prompt_tokens=9, cached_tokens=4, completion_tokens=2)


def streamed(pieces: list[ChoiceDelta], **fields: Any) -> dict[str, Any]:
    stream = builder(**fields)
    data = [stream.start(USAGE), *(stream.chunk(piece, USAGE) for piece in pieces)]
    return accumulated(b"".join([*data, stream.end([choice_of(pieces)], USAGE)]))


def whole(pieces: list[ChoiceDelta], **fields: Any) -> dict[str, Any]:
    return json.loads(json.dumps(builder(**fields).response([choice_of(pieces)], USAGE)))


# -- random pieces ---------------------------------------------------------------------------------

TEXT = st.text(alphabet="ab \n\u00e9\U0001f600", min_size=1, max_size=6) | st.sampled_from(
    ["\n\n", " ", "a"]
)


@dataclass
class Say:
    content: str = ""
    reasoning: str = ""
    call: ToolCallDelta | None = None


@st.composite
def calls(draw: st.DrawFn, index: int) -> list[Say]:
    """Draw one call, split into portions."""
    arguments = json.dumps(
        draw(st.dictionaries(TEXT, st.integers() | TEXT | st.lists(TEXT), max_size=3))
    )
    cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=4)))
    portions = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    call_id, name = f"call_{secrets.token_hex(12)}", f"tool{index}"
    first = Say(
        call=ToolCallDelta(index, call_id, name, portions[0] if draw(st.booleans()) else "")
    )
    rest = portions[1:] if first.call and first.call.arguments else portions
    return [first, *(Say(call=ToolCallDelta(index, None, None, portion)) for portion in rest)]


@st.composite
def says(draw: st.DrawFn, in_order: bool) -> list[ChoiceDelta]:
    """Draw the pieces of one answer in order: thinking, text, calls."""
    words = draw(
        st.lists(st.builds(Say, content=TEXT) | st.builds(Say, reasoning=TEXT), max_size=6)
    )
    told = [say for index in range(draw(st.integers(0, 3))) for say in draw(calls(index))]
    if in_order:
        words.sort(key=lambda say: not say.reasoning)
        order = words + told
    else:
        places = [draw(st.integers(0, len(told))) for _ in words]
        order = []
        for place in range(len(told) + 1):
            order += [word for word, at in zip(words, places, strict=True) if at == place] + told[
                place : place + 1
            ]
    pieces: list[ChoiceDelta] = []
    for say in order:
        new = ChoiceDelta(0, say.content, say.reasoning, (say.call,) if say.call else ())
        last = pieces[-1] if pieces else None
        if (
            last
            and new.content
            and not last.content
            and not last.tool_calls
            and draw(st.booleans())
        ):
            pieces[-1] = ChoiceDelta(0, new.content, last.reasoning)  # several at the same time
        elif (
            last
            and say.call
            and say.call.index not in [c.index for c in last.tool_calls]
            and draw(st.booleans())
        ):
            pieces[-1] = ChoiceDelta(0, last.content, last.reasoning, (*last.tool_calls, say.call))
        else:
            pieces.append(new)
    return [*pieces, ChoiceDelta(0, finished=sample())]


@given(says(in_order=True))
def test_stream_says_what_the_whole_answer_says(pieces: list[ChoiceDelta]):
    one, other = streamed(pieces), whole(pieces)
    assert one | {"id": ""} == other | {"id": ""}


@given(says(in_order=False))
def test_stream_in_any_order_says_the_same_words(pieces: list[ChoiceDelta]):
    one, other = streamed(pieces), whole(pieces)
    assert _gathered(one) == _gathered(other)
    for block in one["content"]:
        assert block["type"] != "thinking" or block["signature"] == signature(block["thinking"])
    assert [b for b in one["content"] if b["type"] == "tool_use"] == [
        b for b in other["content"] if b["type"] == "tool_use"
    ]
    assert (one["stop_reason"], one["usage"]) == (other["stop_reason"], other["usage"])


def _gathered(message: dict[str, Any]) -> list[str]:
    names = ("text", "thinking")
    return ["".join(block.get(name, "") for block in message["content"]).strip() for name in names]


@given(says(in_order=False))
def test_answer_has_one_tool_if_parallel_use_is_disabled(pieces: list[ChoiceDelta]):
    fields = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for message in (streamed(pieces, **fields), whole(pieces, **fields)):
        names = [block["name"] for block in message["content"] if block["type"] == "tool_use"]
        assert names == [name for name in ["tool0"] if choice_of(pieces).tool_calls]


def test_omitted_thinking_is_signed_and_empty():
    pieces = [
        ChoiceDelta(0, reasoning="well, "),
        ChoiceDelta(0, reasoning="yes", content="Yes"),
        ChoiceDelta(0, finished=sample()),
    ]
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    for message in (streamed(pieces, **fields), whole(pieces, **fields)):
        thinking, text = message["content"]
        assert thinking["thinking"] == ""
        assert thinking["signature"]
        assert text["text"] == "Yes"


def test_answer_of_only_a_call_has_no_text_block():
    call = ToolCallDelta(0, "call_abc", "now", "{}")
    pieces = [
        ChoiceDelta(0, content="\n"),
        ChoiceDelta(0, tool_calls=(call,)),
        ChoiceDelta(0, content="\n", finished=sample()),
    ]
    for message in (streamed(pieces), whole(pieces)):
        assert message["content"] == [
            {"type": "tool_use", "id": "toolu_abc", "name": "now", "input": {}}
        ]
        assert message["stop_reason"] == "tool_use"


def test_answer_without_a_word_is_an_empty_message():
    for message in (
        streamed([ChoiceDelta(0, finished=sample())]),
        whole([ChoiceDelta(0, finished=sample())]),
    ):
        assert message["content"] == []
        assert message["stop_reason"] == "end_turn"


def test_arguments_that_were_cut_off_are_what_came():
    call = ToolCallDelta(0, "call_abc", "f", '{"city": "Par", "days": [1, 2')
    pieces = [ChoiceDelta(0, tool_calls=(call,), finished=sample("length", None))]
    message = whole(pieces)
    assert message["content"][0]["input"] == {"city": "Par", "days": [1, 2]}
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ["", "[1]", "nonsense", "null"])
def test_arguments_are_an_object_always(arguments: str):
    call = ToolCallDelta(0, "call_abc", "f", arguments)
    assert (
        whole([ChoiceDelta(0, tool_calls=(call,), finished=sample())])["content"][0]["input"] == {}
    )


@pytest.mark.parametrize(
    ("finished", "max_tokens", "reason", "sequence"),
    [
        (sample("stop", 2), 20, "end_turn", None),
        (sample("stop", "END"), 20, "stop_sequence", "END"),
        (sample("length", None), 20, "max_tokens", None),
        (sample("length", None), 91, "max_tokens", None),
        (sample("length", None), 92, "model_context_window_exceeded", None),
        (sample("abort", "weights changed"), 20, "pause_turn", None),
    ],
)
def test_stop_reasons(finished: TrainingSample, max_tokens: int, reason: str, sequence: str | None):
    pieces = [ChoiceDelta(0, content="a", finished=finished)]
    for message in (streamed(pieces, max_tokens=max_tokens), whole(pieces, max_tokens=max_tokens)):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_max_tokens_ends_with_the_context():
    assert builder(max_tokens=10_000).asks[0].params.max_tokens == 91
    with pytest.raises(ApiError, match=r"prompt is too long: 100 tokens > 99 maximum") as caught:
        builder([1] * 100)
    assert caught.value.status == 400


def test_cached_tokens_are_apart_or_hidden():
    pieces = [ChoiceDelta(0, content="a", finished=sample())]
    usage = {"output_tokens": 2, "cache_creation_input_tokens": 0}
    seen = usage | {"input_tokens": 5, "cache_read_input_tokens": 4}
    hidden = usage | {"input_tokens": 9, "cache_read_input_tokens": 0}
    shy = served(SERVED.tokenizer, hide_cached_tokens=True)
    assert streamed(pieces)["usage"] == whole(pieces)["usage"] == seen
    assert streamed(pieces, served=shy)["usage"] == whole(pieces, served=shy)["usage"] == hidden


def test_failure_is_an_error_event():
    (event,) = events_of(builder().failure(ApiError(503, "the engine is not running.")))
    assert event["type"] == "error"
    assert event["error"] == {"type": "overloaded_error", "message": "the engine is not running."}

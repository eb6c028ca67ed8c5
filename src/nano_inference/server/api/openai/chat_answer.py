"""`POST /v1/chat/completions`. The text of messages never becomes special tokens, which only the
template writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_inference.server.api.openai.answer import OpenAIBuilder
from nano_inference.server.api.openai.chat_request import chat_prompt, demand_of
from nano_inference.server.api.openai.models import (
    CHAT,
    ChatRequest,
)
from nano_inference.server.api.parsing import ToolCallDelta
from nano_inference.server.api.shared.answers import ROWS_AT_ONCE, LazyArray, at_least
from nano_inference.server.api.shared.choices import Choice, ChoiceDelta, ToolCall
from nano_inference.server.api.shared.grammars import call_format, with_calls
from nano_inference.server.api.shared.openapi import operation
from nano_inference.server.api.shared.prompts import (
    behind_reasoning,
    checked_prompt,
    parser_of,
    room,
)
from nano_inference.server.api.shared.protocol import ApiProtocol, RequestUsage, Served
from nano_inference.server.api.shared.sampling import num_logprobs
from nano_inference.server.errors import bad_request
from nano_inference.types import TrainingSample


class ChatBuilder(OpenAIBuilder):
    """One request for a chat completion."""

    def __init__(self, request: ChatRequest, served: Served, request_id: str) -> None:
        super().__init__(
            request,
            served,
            request_id,
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
            prefix="chatcmpl-",
        )
        self.request: ChatRequest = request
        if request.top_logprobs and not request.logprobs:
            raise bad_request("top_logprobs requires logprobs: true.", "top_logprobs")
        if request.logprob_token_ids and not request.logprobs:
            raise bad_request("logprob_token_ids requires logprobs: true.", "logprob_token_ids")
        top_logprobs = num_logprobs(request.top_logprobs, served, "top_logprobs") or 0
        name = (
            "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        )
        asked = getattr(request, name)
        self._prompt = checked_prompt(
            self.cut(self.rendered(request, served), asked), served, "messages"
        )
        max_tokens = room(self._prompt, asked, served, None, name)
        behind = behind_reasoning(
            self._prompt, served, goes_on=bool(request.continue_final_message)
        )
        self.asks = [
            self.ask(self._prompt, max_tokens, top_logprobs, self.num_prompt_logprobs, behind)
        ]
        demand = demand_of(request)
        self.asks = with_calls(
            self.asks, demand, served, goes_on=bool(request.continue_final_message)
        )
        self.make_parser = parser_of(
            self._prompt,
            served,
            tools=None if demand is None else demand.schemas,
            format=call_format(demand, served),
        )
        self._extras = bool(request.logprobs or request.return_token_ids or request.raw_logprobs)
        self._plain = not (self._extras or self.continuous_usage)
        self._shows_reasoning = request.include_reasoning is not False
        self._called: set[tuple[int, int]] = set()  # choices and their tool calls

    def rendered(self, request: ChatRequest, served: Served) -> list[int]:
        """Return the token ids of the request's chat."""
        return chat_prompt(request, request.messages, served)

    # -- a stream ----------------------------------------------------------------------------------

    def start(self, usage: RequestUsage) -> bytes:
        """Return an event with the role for every choice."""
        more = {"prompt_token_ids": self._prompt if self.request.return_token_ids else None}
        return b"".join(
            self.event(
                _choice(index, {"role": "assistant", "content": ""}), usage, None if index else more
            )
            for index in range(self.num_samples)
        )

    def chunk(self, piece: ChoiceDelta, usage: RequestUsage) -> bytes:
        """Return events with new text, reasoning and tool calls, and at last the finish reason."""
        if self._plain and piece.finished is None and not piece.reasoning and not piece.tool_calls:
            if not piece.content:
                return b""
            return self.text_event(piece.index, piece.content)
        events = [_choice(piece.index, delta) for delta in self._deltas(piece)]
        if self._extras and piece.token_ids:
            if not events:  # the text lags behind the tokens
                events = [_choice(piece.index, {"content": ""})]
            events[0] |= self._extras_of(piece)
        more = None
        if piece.finished is not None:
            called = any(index == piece.index for index, _ in self._called)
            events.append(_choice(piece.index, {}, self._reason(piece.finished, called)))
            events[-1] |= self.ending(piece.finished)
            if self.request.prompt_logprobs is not None and not piece.index:
                more = {"prompt_logprobs": self.prompt_logprobs(piece.finished)}
        last = len(events) - 1
        return b"".join(
            self.event(event, usage, more if index == last else None)
            for index, event in enumerate(events)
        )

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice with new text and no other values."""
        return _choice(index, {"content": text})

    def _deltas(self, piece: ChoiceDelta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if piece.reasoning and self._shows_reasoning:
            deltas.append({"reasoning_content": piece.reasoning, "reasoning": piece.reasoning})
        if piece.content:
            deltas.append({"content": piece.content})
        broken = {(piece.index, call.index) for call in piece.tool_calls if call.broken}
        self._called -= broken
        calls = [call for call in piece.tool_calls if self._keeps(call.index) and not call.broken]
        self._called |= {(piece.index, call.index) for call in calls}
        return deltas + [{"tool_calls": [_tool_call_delta(call)]} for call in calls]

    def _keeps(self, number: int) -> bool:
        return number == 0 or self.request.parallel_tool_calls is not False

    @staticmethod
    def _reason(sample: TrainingSample, called: bool) -> str:
        return "tool_calls" if called and sample.finish_reason == "stop" else sample.finish_reason

    # -- the answer as a whole ---------------------------------------------------------------------

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole answer."""
        first, scored = choices[0].finished, self.request.prompt_logprobs is not None
        extra = {
            "prompt_logprobs": self.prompt_logprobs(first)
            if scored and first is not None
            else None,
            "prompt_token_ids": self._prompt if self.request.return_token_ids else None,
            "kv_transfer_params": None,
        }
        return self.head | {
            "choices": LazyArray(map(self._finished, choices)),
            "usage": self.usage_of(usage, choices),
            **self.without_nulls(extra),
        }

    def _finished(self, choice: Choice) -> dict[str, Any]:
        sample = choice.finished
        assert sample is not None
        calls = [call for number, call in enumerate(choice.tool_calls) if self._keeps(number)]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content or (None if calls else ""),
            "refusal": None,
        }
        message["reasoning_content"] = message["reasoning"] = (
            (choice.reasoning or None) if self._shows_reasoning else None
        )
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        message = self.without_nulls(message)
        fields = _choice(choice.index, message, self._reason(sample, bool(calls)), "message")
        fields |= {"routed_experts": None} | self.ending(sample)
        if self._extras:
            fields |= self._extras_of(choice.whole)
        return self.without_nulls(fields)

    # -- parts -------------------------------------------------------------------------------------

    def _extras_of(self, piece: ChoiceDelta) -> dict[str, Any]:
        """Return the values per token that the client asked for."""
        fields: dict[str, Any] = {}
        if self.request.logprobs:
            rows = LazyArray(self.token_rows(piece), ROWS_AT_ONCE)
            fields["logprobs"] = {"content": rows, "refusal": None}
        if self.request.return_token_ids:
            fields["token_ids"] = piece.token_ids
        if self.request.raw_logprobs:
            fields["raw_logprobs"] = [at_least(each) for each in piece.raw_logprobs or ()]
        return fields

    def token_rows(self, piece: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """Yield the logprob and the most probable tokens of each token."""
        for token_id, logprob, top in zip(
            piece.token_ids, piece.logprobs, self.tops_of(piece), strict=True
        ):
            best = zip(top.token_ids, top.logprobs, strict=True)
            yield self._token(token_id, logprob) | {
                "top_logprobs": [self._token(*each) for each in best]
            }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if self.texts is None else self.texts.bytes_of(token_id)
        # invalid UTF-8 is replaced; `bytes` has the original
        text = self.token_text(token_id) if self.names_ids else data.decode("utf-8", "replace")
        return {"token": text, "logprob": at_least(logprob), "bytes": list(data)}


def _choice(
    index: int, said: dict[str, Any], reason: str | None = None, name: str = "delta"
) -> dict[str, Any]:
    return {
        "index": index,
        name: said,
        "logprobs": None,
        "finish_reason": reason,
        "token_ids": None,
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _tool_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


PROTOCOL = ApiProtocol(
    ChatRequest,
    ChatBuilder,
    operation(ChatRequest, CHAT, summary="Create the next message of a chat", streams=True),
)

"""`SessionTurn`: a chat completion whose prompt is a session, and which becomes its next turn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nano_inference.server.api.openai.chat_answer import ChatBuilder
from nano_inference.server.api.openai.chat_request import plain_message, template_kwargs
from nano_inference.server.api.openai.models import ChatRequest, Message, Tool
from nano_inference.server.api.shared.choices import Choice
from nano_inference.server.api.shared.prompts import require_at_most, require_possible_length
from nano_inference.server.api.shared.protocol import RequestUsage, Served
from nano_inference.server.errors import bad_request
from nano_inference.server.sessions.models import TurnRequest
from nano_inference.server.sessions.store import Session
from nano_inference.text.conversation import Conversation


class SessionTurn(ChatBuilder):
    """A turn of a session, in OpenAI's format. If it fails or is aborted, the session is unchanged.

    Args:
        request: New messages and sampling parameters.
        served: Served model.
        request_id: Id of the request.
        session: Session, which has begun this turn.
        turn: Key of the turn.
    """

    def __init__(
        self,
        request: TurnRequest,
        served: Served,
        request_id: str,
        *,
        session: Session,
        turn: object,
    ) -> None:
        self._session, self._turn = session, turn
        super().__init__(_of_session(request, session), served, request_id)
        if self.num_samples > 1:
            raise bad_request("n must be 1: a session has one next turn; fork it first.", "n")
        (ask,) = self.asks
        self.asks = [replace(ask, limits={**ask.limits, "turn_of": session.turn_of})]

    def rendered(self, request: ChatRequest, served: Served) -> list[int]:
        """Return the token ids of the session with the new messages."""
        self._chat = extended(self._session.chat, request.messages, served)
        if not self._chat.is_open:
            raise bad_request(
                "the last turn of the session is the model's; send messages to append first.",
                "messages",
            )
        return list(self._chat)

    def response(self, choices: Sequence[Choice], usage: RequestUsage) -> Mapping[str, Any]:
        """Return the whole answer, after it has become the session's next turn."""
        self._settle(choices)
        return super().response(choices, usage)

    def end(self, choices: Sequence[Choice], usage: RequestUsage) -> bytes:
        """Return the end of a stream, after the answer has become the session's next turn."""
        self._settle(choices)
        return super().end(choices, usage)

    def ended(self) -> None:
        """End the turn."""
        self._session.end(self._turn)

    def _settle(self, choices: Sequence[Choice]) -> None:
        (choice,) = choices
        sample = choice.finished
        if sample is None or sample.finish_reason == "abort" or not sample.completion_tokens:
            return
        chat = self._chat.with_turn(
            sample.completion_tokens, _message(choice), list(sample.logprobs)
        )
        if self._session.turn_of is None:
            self._session.turn_of = sample.request_id
        self._session.chat = chat


def extended(chat: Conversation, messages: Sequence[Message], served: Served) -> Conversation:
    """Return a conversation with a request's messages. Raises `ApiError` and `InvalidRequest`."""
    if not messages:
        return chat
    plain = plain_messages(messages, served, len(chat.messages))
    return chat.with_messages(plain)


def plain_messages(
    messages: Sequence[Message], served: Served, num_before: int = 0
) -> list[dict[str, Any]]:
    """Return messages in the form for templates, within the limits of a chat. Raises `ApiError`."""
    limit, what = served.config.max_messages, "the number of messages"
    require_at_most(num_before + len(messages), limit, "messages", what)
    plain = [plain_message(message, index, served) for index, message in enumerate(messages)]
    text = "".join(each["content"] or "" for each in plain)
    require_possible_length(text, served, "messages")
    return plain


def _of_session(request: TurnRequest, session: Session) -> TurnRequest:
    """Return the request with the session's options. Raises `ApiError` 400 for a field that
    contradicts them.
    """
    chat, options = session.chat, session.options
    tools = None if request.tools is None else [_dumped(tool) for tool in request.tools]
    if tools is not None and tools != chat.tools:
        raise bad_request("tools must be the session's; omit them.", "tools")
    variables = template_kwargs(request)
    if any(chat.template_kwargs.get(name) != value for name, value in variables.items()):
        name = "chat_template_kwargs" if request.chat_template_kwargs else "reasoning_effort"
        raise bad_request(f"{name} must be the session's; omit it.", name)
    if request.model is not None and options.model not in (None, request.model):
        raise bad_request("model must be the session's; omit it.", "model")
    fields = {"priority", "keep_cache_seconds", "cache_priority", "cache_salt", "model"}
    update = {name: getattr(options, name) for name in fields if getattr(request, name) is None}
    if chat.tools is not None:
        update["tools"] = [Tool.model_validate(tool) for tool in chat.tools]
    return request.model_copy(update=update)


def _dumped(tool: Any) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


def _message(choice: Choice) -> dict[str, Any]:
    """Return the answer as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object(call.arguments)},
            }
            for call in choice.tool_calls
        ]
    return message


def _object(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments

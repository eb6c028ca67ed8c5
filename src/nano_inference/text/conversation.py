"""`Conversation`: a chat as token ids, extended turn by turn without encoding its past again."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple, get_args

from nano_inference.errors import InvalidRequest, TemplateRewritesPast
from nano_inference.text import control_tokens
from nano_inference.text.call_shapes import calls_of
from nano_inference.text.chat import Tools, render_marked
from nano_inference.text.messages import Messages, plain
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import TrainingSample

# Policy for a template that renders an earlier turn differently than it was sampled
OnRewrite = Literal["reject", "keep"]
Author = Literal["template", "model"]


class TokenSpan(NamedTuple):
    """Tokens [start, end) of a conversation.

    Attributes:
        author: `"model"` for sampled tokens, `"template"` for rendered messages.
        num_messages: Number of the conversation's messages up to the end of the span.
    """

    start: int
    end: int
    author: Author
    num_messages: int


@dataclass(frozen=True)
class Conversation:
    """A chat as token ids. Every method returns a new conversation, so a fork costs nothing.

    Sampled ids stay as they were sampled. New messages are rendered by the chat template, and only
    the text after the past is encoded. The rendering of the whole conversation must begin with the
    text of the past, so that a trainer which renders it again gets the same text. A template that
    drops earlier reasoning or trims a turn breaks this, and `on_rewrite` decides: `"reject"` raises
    `TemplateRewritesPast`, `"keep"` takes the text after the turn's end and keeps the ids.

    A conversation is a prompt: pass it to `generate` where token ids are expected.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages, as for `encode_chat`. At least one.
        tools: Tools that the model may call.
        template_kwargs: More variables of the template, such as `enable_thinking`.
        on_rewrite: Policy for a template that rewrites the past.

    Attributes:
        token_ids: Ids of the prompt for the next turn, or of the whole chat after a turn.
        spans: Who wrote which tokens, in order and without gaps.
        logprobs: Log-probability of each token. 0 for tokens that were not sampled.

    Raises `InvalidRequest` for messages or options that the template does not render.
    """

    tokenizer: Tokenizer = field(repr=False)
    messages: tuple[Mapping[str, Any], ...]
    tools: Tools | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    on_rewrite: OnRewrite = "reject"
    token_ids: tuple[int, ...] = field(init=False, repr=False)
    spans: tuple[TokenSpan, ...] = field(init=False, repr=False)
    logprobs: tuple[float, ...] = field(init=False, repr=False)
    # text of all ids up to the last sampled one, in the form of `control_tokens.named_text`
    _past: str = field(init=False, repr=False, default="")
    _text: str = field(init=False, repr=False)  # the same for all ids

    def __post_init__(self) -> None:
        if self.on_rewrite not in get_args(OnRewrite):
            raise InvalidRequest(
                f"on_rewrite={self.on_rewrite!r} must be one of {', '.join(get_args(OnRewrite))}."
            )
        messages = tuple(map(plain, self.messages))
        _set(self, messages=messages, tools=plain(list(self.tools)) if self.tools else None)
        _set(self, template_kwargs=dict(self.template_kwargs))
        text = self._rendered(messages)
        ids = tuple(control_tokens.encode_named(self.tokenizer, text))
        spans = (TokenSpan(0, len(ids), "template", len(messages)),)
        _set(self, token_ids=ids, spans=spans, logprobs=(0.0,) * len(ids), _text=text)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_characters(self) -> int:
        """Number of characters of its text."""
        return len(self._text)

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True for each sampled token."""
        return tuple(
            chain.from_iterable(repeat(s.author == "model", s.end - s.start) for s in self.spans)
        )

    @property
    def is_open(self) -> bool:
        """True if the last tokens are the template's, so that the model's turn can be sampled."""
        return self.spans[-1].author == "template"

    def with_messages(self, messages: Messages) -> "Conversation":
        """Return the conversation with more messages, up to the opening of the model's next turn.

        Raises:
            InvalidRequest: There is no message, or the template does not render one.
            TemplateRewritesPast: The template renders the past differently.
        """
        new = tuple(map(plain, messages))
        if not new:
            raise InvalidRequest("there is no message to append; give at least one.")
        every = (*self.messages, *new)
        sampled = [span for span in self.spans if span.author == "model"]
        if not sampled:
            return replace(self, messages=every)
        text = self._rendered(every)
        rest = self._rest_of(text, every, sampled[-1].num_messages)
        start = sampled[-1].end
        ids = self._encoded_after(rest)
        past = self.spans[: self.spans.index(sampled[-1]) + 1]
        return self._changed(
            messages=every,
            token_ids=(*self.token_ids[:start], *ids),
            spans=(*past, TokenSpan(start, start + len(ids), "template", len(every))),
            logprobs=(*self.logprobs[:start], *repeat(0.0, len(ids))),
            _text=self._past + rest,
        )

    def with_turn(
        self,
        token_ids: Sequence[int],
        message: Mapping[str, Any] | None = None,
        logprobs: Sequence[float] | None = None,
    ) -> "Conversation":
        """Return the conversation with the model's turn.

        Args:
            token_ids: Sampled ids, including the stop id.
            message: The turn as a message, parsed from its text. By default all its text is the
                content.
            logprobs: Log-probability of each id. By default 0.

        Raises:
            InvalidRequest: The model's turn is not open, there are no ids, or an argument does not
                fit the ids.
        """
        ids = tuple(token_ids)
        if not self.is_open:
            raise InvalidRequest("the last turn is the model's; append a message first.")
        if not ids:
            raise InvalidRequest("the model's turn has no tokens; give at least one.")
        if logprobs is not None and len(logprobs) != len(ids):
            raise InvalidRequest(
                f"got {len(logprobs)} logprobs for {len(ids)} ids; give one per id."
            )
        if message is None:
            message = {"role": "assistant", "content": self.tokenizer.decode(ids)}
        if message.get("role") != "assistant":
            raise InvalidRequest(
                f"the model's turn has the role {message.get('role')!r}; set it to 'assistant'."
            )
        every = (*self.messages, plain(message))
        text, start = self._text + self._text_of(ids), len(self.token_ids)
        return self._changed(
            messages=every,
            token_ids=self.token_ids + ids,
            spans=(*self.spans, TokenSpan(start, start + len(ids), "model", len(every))),
            logprobs=(*self.logprobs, *(logprobs or repeat(0.0, len(ids)))),
            _past=text,
            _text=text,
        )

    def with_sample(
        self, sample: TrainingSample, message: Mapping[str, Any] | None = None
    ) -> "Conversation":
        """Return the conversation with a sample of its prompt as the model's turn.

        Raises `InvalidRequest` if the sample has another prompt, and like `with_turn`.
        """
        if sample.prompt_tokens != self.token_ids:
            raise InvalidRequest(
                f"the sample's prompt ({len(sample.prompt_tokens)} ids) is not the conversation "
                f"({len(self)} ids); generate from the conversation itself."
            )
        return self.with_turn(sample.completion_tokens, message, sample.logprobs)

    def _changed(self, **fields: Any) -> "Conversation":
        new = copy.copy(self)
        _set(new, **fields)
        return new

    def _text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids that follow the conversation."""
        context = control_tokens.encode_named(
            self.tokenizer, self._text[control_tokens.last_control(self._text) :]
        )
        before = control_tokens.named_tokens(self.tokenizer, context)
        text = control_tokens.named_tokens(self.tokenizer, [*context, *ids])
        if text.startswith(before):
            return text[len(before) :]
        return control_tokens.named_tokens(self.tokenizer, ids)

    def _rendered(self, messages: Messages, *, opening: bool = True) -> str:
        """Return messages as text in the form of `control_tokens.named_text`."""
        text, _ = render_marked(
            self.tokenizer,
            messages,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
            add_generation_prompt=opening,
        )
        return control_tokens.named_text(self.tokenizer, text)

    def _rest_of(self, text: str, messages: Messages, num_past: int) -> str:
        """Return the part of a rendered text after the past, whose last message is `num_past`."""
        if text.startswith(self._past):
            return text[len(self._past) :]
        if self.on_rewrite == "reject":
            raise TemplateRewritesPast(
                "the chat template renders an earlier turn differently than it was sampled "
                f"({_difference(self._past, text)}); set on_rewrite='keep' to keep the sampled ids."
            )
        return self._after_turn(messages, num_past - 1)

    def _after_turn(self, messages: Messages, index: int) -> str:
        """Return the text after the end of the turn `messages[index]`."""
        mark = control_tokens.secret_digits()
        marked = [*messages[:index], _with_mark(messages[index], mark), *messages[index + 1 :]]
        text = self._rendered(marked)
        start = text.find(mark)
        if start < 0:
            raise TemplateRewritesPast(
                "the chat template omits the model's last turn, so the text after it is unknown; "
                "start a new conversation."
            )
        ends = {name for name in (self._stop, *self._turn_ends) if name is not None}
        closings = {at: name for name in ends if (at := text.find(name, start)) >= 0}
        if not closings:
            raise TemplateRewritesPast(
                "the chat template writes no control token at the end of the model's turn, so the "
                "text after it is unknown; start a new conversation."
            )
        end = min(closings)
        rest = text[end:] if self._stop is None else text[end + len(closings[end]) :]
        return rest.replace(mark, "")  # an answer may repeat the name of its call

    @property
    def _stop(self) -> str | None:
        """Name of the control token that ended the last sampled turn, or None."""
        last = self._past[control_tokens.last_control(self._past) :]
        return last if last and last == control_tokens.first_control(last) else None

    @property
    def _turn_ends(self) -> Iterator[str | None]:
        """Names of control tokens that end a turn of the model."""
        if self.tokenizer.eos_token_id is not None:
            yield control_tokens.named_tokens(self.tokenizer, [self.tokenizer.eos_token_id])
        word = control_tokens.secret_digits()
        text = self._rendered(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": word}],
            opening=False,
        )
        yield control_tokens.first_control(text, max(text.find(word), 0))

    def _encoded_after(self, rest: str) -> list[int]:
        """Return the ids of a text after the past. It is encoded from the last control token on,
        where the encoding of a text can be split.
        """
        context = self._past[control_tokens.last_control(self._past) :]
        before = control_tokens.encode_named(self.tokenizer, context)
        ids = control_tokens.encode_named(self.tokenizer, context + rest)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        if self.on_rewrite == "reject":
            raise TemplateRewritesPast(
                "the tokenizer joins the end of the model's turn with the template's next text; "
                "set on_rewrite='keep' to keep the sampled ids."
            )
        return control_tokens.encode_named(self.tokenizer, rest)


def _set(conversation: Conversation, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(conversation, name, value)


def _with_mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return a message with a mark after its last text: in the name of its last call, or at the
    end of its content.
    """
    marked = copy.deepcopy(dict(message))
    content = marked.get("content")
    if calls := calls_of(marked):
        function = calls[-1]["function"]
        function["name"] = f"{function.get('name')}{mark}"
    elif isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        content[-1]["text"] += mark
    else:
        marked["content"] = f"{content or ''}{mark}"
    return marked


def _difference(past: str, text: str) -> str:
    same = next(
        (at for at, (a, b) in enumerate(zip(past, text, strict=False)) if a != b), len(text)
    )
    return f"they differ from character {same} on"

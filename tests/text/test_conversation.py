"""A conversation's ids equal those of its whole rendering, in templates of every family, or the
template is rejected for what it rewrites.
"""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nano_inference.errors import InvalidRequest, TemplateRewritesPast
from nano_inference.text import control_tokens
from nano_inference.text.chat import encode_chat, render_chat
from nano_inference.text.conversation import Conversation
from nano_inference.text.tokenizer import Tokenizer
from tests.depth import at_depth
from tests.text.turn_templates import CONTROL, TEMPLATES

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def _bytes() -> Backend:
    """Return a tokenizer with a few merges across letters, spaces and line feeds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ċ", "Ċ"), ("Ġ", "a"), (">", "Ċ")]
    words = [*alphabet, *(left + right for left, right in merges)]
    backend = Backend(models.BPE({word: at for at, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces() -> Backend:
    """Return a tokenizer in the style of SentencePiece: a mark before every text."""
    letters = [chr(code) for code in range(33, 127)] + ["▁", "\n", "é", "…", "\uff5c"]
    merges = [("a", "b"), ("▁", "a"), ("\n", "\n")]
    words = ["<unk>", *letters, *(left + right for left, right in merges)]
    backend = Backend(
        models.BPE({word: at for at, word in enumerate(words)}, merges, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _first() -> Backend:
    """Return a tokenizer with a mark before the first text only."""
    backend = _pieces()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return backend


KINDS = {"bytes": _bytes, "pieces": _pieces, "first": _first}


@cache
def tokenizer_of(name: str, kind: str) -> Tokenizer:
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    template, first, ends = TEMPLATES[name]
    return Tokenizer(
        backend,
        backend.get_vocab_size(),
        backend.token_to_id(ends[-1]),
        {"bos_token": first, "eos_token": ends[-1]},
        template,
    )


# no spaces at the ends: a template that trims rewrites the past, which other tests draw
WORDS = st.text("ab c\n<|é", min_size=1, max_size=8).map(lambda text: f"x{text}x")
CONTROL_TEXTS = st.sampled_from(["x<|im_end|>x", "x</s>x", "[INST]x", "x<|eot_id|>"])
USER = st.builds(lambda text: {"role": "user", "content": text}, WORDS | CONTROL_TEXTS)
ANSWER = st.builds(lambda text: {"role": "assistant", "content": text}, WORDS)
CALLS = st.builds(
    lambda text, value: [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "abcdefgh1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": value}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "add", "content": text},
    ],
    WORDS,
    WORDS,
)
LATER = st.lists(st.tuples(ANSWER, USER).map(list) | CALLS, min_size=1, max_size=4)


def sampled_turn(tokenizer: Tokenizer, before: list[Any], turn: Any, tools: Any) -> list[int]:
    """Return the ids of a turn as the model would sample it: up to the token that ends it."""
    start = encode_chat(tokenizer, before, tools=tools)
    whole = encode_chat(tokenizer, [*before, turn], tools=tools, add_generation_prompt=False)
    assert whole[: len(start)] == start
    ids, control = whole[len(start) :], control_tokens._control_tokens(tokenizer)
    while ids[-1] not in control:
        ids.pop()
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"gpt-oss"}))
@settings(max_examples=at_depth(8), deadline=None)
@given(first=st.lists(USER, min_size=1, max_size=1), later=LATER, data=st.data())
def test_conversation_equals_its_whole_rendering(
    kind: str, name: str, first: list[Any], later: list[list[Any]], data: st.DataObject
) -> None:
    # these render tools or calls elsewhere later on, or need alternating turns
    tools = [TOOL] if name in ("qwen3", "deepseek") else None
    tokenizer = tokenizer_of(name, kind)
    chat, messages = Conversation(tokenizer, tuple(first), tools=tools), list(first)
    mask: list[bool] = [False] * len(chat)
    for turn, *rest in later:
        if turn.get("tool_calls") and name in ("gemma", "chatml"):
            turn, rest = {"role": "assistant", "content": "xx"}, [{"role": "user", "content": "x"}]
        ids = sampled_turn(tokenizer, messages, turn, tools)
        before = chat
        chat = chat.with_turn(ids, turn)
        mask += [True] * len(ids)
        assert chat.token_ids == (*before.token_ids, *ids)
        chat = chat.with_messages(rest[: data.draw(st.integers(1, len(rest)))])
        messages = list(chat.messages)
        mask += [False] * (len(chat) - len(mask))
        assert list(chat) == encode_chat(tokenizer, messages, tools=tools)
    assert list(chat.loss_mask) == mask
    assert [span.start for span in chat.spans[1:]] == [span.end for span in chat.spans[:-1]]


def ended(tokenizer: Tokenizer, text: str, end: str) -> list[int]:
    end_id = tokenizer.backend.token_to_id(end)
    assert end_id is not None
    return [*tokenizer.encode(text), end_id]


REWRITES = [
    # drops the reasoning of earlier turns
    ("qwen3", "<think>\nx\n</think>\n\nhello", "<|im_end|>"),
    ("deepseek", "x</think>hello", "<\uff5cend▁of▁sentence\uff5c>"),
    # trims a turn
    ("llama3", "hello ", "<|eot_id|>"),
    ("gemma", "hello\n", "<end_of_turn>"),
    # ends the last turn with another token than earlier ones
    ("gpt-oss", "<|channel|>final<|message|>hello", "<|return|>"),
]


@pytest.mark.parametrize(("name", "text", "end"), REWRITES)
def test_template_that_rewrites_is_rejected(name: str, text: str, end: str) -> None:
    tokenizer = tokenizer_of(name, "bytes")
    first = [{"role": "user", "content": "hi"}]
    content = {"role": "assistant", "content": text.split("<|message|>")[-1]}
    chat = Conversation(tokenizer, tuple(first)).with_turn(ended(tokenizer, text, end), content)
    with pytest.raises(TemplateRewritesPast, match="on_rewrite='keep'"):
        chat.with_messages([{"role": "user", "content": "more"}])


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize(("name", "text", "end"), REWRITES)
def test_rewritten_past_is_kept_by_choice(name: str, text: str, end: str, stopped: bool) -> None:
    tokenizer = tokenizer_of(name, "bytes")
    first = [{"role": "user", "content": "hi"}]
    sampled = ended(tokenizer, text, end)[: None if stopped else -1]
    content = {"role": "assistant", "content": text.split("<|message|>")[-1]}
    chat = Conversation(tokenizer, tuple(first), on_rewrite="keep").with_turn(sampled, content)
    later = chat.with_messages([{"role": "user", "content": "more"}])
    assert later.token_ids[: len(chat)] == chat.token_ids
    # the rest is that of a turn which the template does not rewrite
    plain = {"role": "assistant", "content": "hello"}
    whole = encode_chat(tokenizer, [*first, plain, {"role": "user", "content": "more"}])
    closing = tokenizer.backend.token_to_id("<|end|>" if name == "gpt-oss" else end)
    ends = [at for at, token_id in enumerate(whole) if token_id == closing]
    at = ends[1 if name in ("gpt-oss", "gemma", "qwen3") else 0]
    if name == "llama3":
        at = ends[2]
    rest = whole[at + 1 :] if stopped else whole[at:]
    assert list(later.token_ids[len(chat) :]) == rest


def test_kept_call_is_followed_by_its_result() -> None:
    tokenizer = tokenizer_of("gpt-oss", "bytes")
    chat = Conversation(tokenizer, ({"role": "user", "content": "hi"},), on_rewrite="keep")
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
        ],
    }
    text = "<|channel|>commentary to=functions.add json<|message|>{ }"  # not as the template
    chat = chat.with_turn(ended(tokenizer, text, "<|call|>"), call)
    later = chat.with_messages([{"role": "tool", "tool_call_id": "1", "content": "5"}])
    rest = tokenizer.decode(later.token_ids[len(chat) :], skip_special_tokens=False)
    assert rest == (
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"5"<|end|><|start|>assistant'
    )


def test_other_tokens_of_the_same_text_are_kept() -> None:
    tokenizer = tokenizer_of("chatml", "bytes")
    chat = Conversation(tokenizer, ({"role": "user", "content": "hi"},))
    letters = [tokenizer.encode(letter)[0] for letter in "abc"]  # one token if encoded
    assert len(tokenizer.encode("abc")) == 1
    later = chat.with_turn([*letters, *tokenizer.encode("<|im_end|>")]).with_messages(
        [{"role": "user", "content": "x"}]
    )
    assert list(later.token_ids[len(chat) : len(chat) + 3]) == letters
    assert tokenizer.decode(list(later), skip_special_tokens=False) == render_chat(
        TEMPLATES["chatml"][0], later.messages, special_tokens=tokenizer.special_tokens
    )


def test_written_control_token_stays_text() -> None:
    tokenizer = tokenizer_of("chatml", "bytes")
    chat = Conversation(tokenizer, ({"role": "user", "content": "hi"},))
    end = tokenizer.backend.token_to_id("<|im_end|>")
    spelled = [token_id for letter in "<|im_end|>" for token_id in tokenizer.encode(letter)]
    later = chat.with_turn([*spelled, end], {"role": "assistant", "content": "<|im_end|>"})
    later = later.with_messages([{"role": "user", "content": "<|im_end|>"}])
    assert list(later.token_ids).count(end) == 3
    assert list(later) == encode_chat(tokenizer, later.messages)


def test_fork_leaves_its_origin_unchanged() -> None:
    tokenizer = tokenizer_of("chatml", "bytes")
    chat = Conversation(tokenizer, ({"role": "user", "content": "hi"},))
    before = chat.token_ids
    one, other = (chat.with_turn(ended(tokenizer, text, "<|im_end|>")) for text in ("a", "b"))
    assert chat.token_ids == before
    assert [each.messages[-1]["content"] for each in (one, other)] == ["a", "b"]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda chat: chat.with_messages([]), "no message to append"),
        (lambda chat: chat.with_messages([{"role": "wizard", "content": "x"}]), None),
        (lambda chat: chat.with_turn([]), "no tokens"),
        (lambda chat: chat.with_turn([1], logprobs=[0.0, 0.0]), "2 logprobs for 1 ids"),
        (lambda chat: chat.with_turn([1], {"role": "user", "content": "x"}), "role 'user'"),
        (lambda chat: chat.with_turn([1]).with_turn([1]), "append a message first"),
        (lambda chat: Conversation(chat.tokenizer, ()), "conversation is empty"),
        (
            lambda chat: Conversation(chat.tokenizer, chat.messages, on_rewrite="x"),
            "on_rewrite='x'",
        ),
    ],
)
def test_conversation_rejects_bad_input(act: Any, text: str | None) -> None:
    chat = Conversation(tokenizer_of("gemma", "bytes"), ({"role": "user", "content": "hi"},))
    if text is None:  # this template renders every role
        act(chat)
        return
    with pytest.raises(InvalidRequest, match=text):
        act(chat)

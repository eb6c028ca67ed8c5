"""Token ids of a conversation's earlier pieces are used again, and equal those of the whole."""

import threading
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS
from nano_inference.checkpoints.loading import resolve_model
from nano_inference.errors import ModelLoadError
from nano_inference.text import reuse
from nano_inference.text.chat import encode_chat
from nano_inference.text.reuse import Memo, cut_pattern, pieces
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.depth import at_depth

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
GEMMA = """{% for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}{% endfor %}"""
LETTERS = [chr(code) for code in range(32, 127)] + ["\n", "é", "▁", "🙂"]


def backend(kind: str) -> Backend:
    """Return a tokenizer of one of the kinds of spaces."""
    words = {word: index for index, word in enumerate(["<unk>", *LETTERS, "ab", "▁a", "▁▁"])}
    made = Backend(models.BPE(words, [("a", "b"), ("▁", "a"), ("▁", "▁")], unk_token="<unk>"))
    if kind == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif kind == "always":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    elif kind == "prepend":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Lowercase()]
        )
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Backend(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "space")
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(each, normalized=False) for each in ("<|im_start|>", "<|im_end|>", "<s>")]
    )
    made.add_tokens([AddedToken("<think>", lstrip=True, rstrip=True), AddedToken("AB")])
    return made


def tokenizer(made: Backend, template: str = CHATML) -> Tokenizer:
    return Tokenizer(made, made.get_vocab_size(), None, {}, template)


KINDS = {kind: tokenizer(backend(kind)) for kind in ("first", "always", "prepend", "byte", "space")}
FRAGMENTS = (
    *("<|im_start|>", "<|im_end|>", "<s>", "<think>", "AB", " ", "\n", "  ", "ab", "<|im_", "|>"),
    *("<", "a", "é", "x" * 256, " word" * 60),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from(LETTERS), max_size=30).map("".join)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    cuts = cut_pattern(tokenizer)
    assert cuts is not None
    return [
        each
        for piece in pieces(cuts, text)
        for each in tokenizer.backend.encode(piece, add_special_tokens=False).ids
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(TEXTS)
@settings(max_examples=at_depth(200), deadline=None)
def test_ids_of_pieces_are_those_of_the_whole(kind: str, text: str) -> None:
    whole = KINDS[kind].backend.encode(text, add_special_tokens=False).ids
    assert encoded(KINDS[kind], text) == whole


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_embedded_models_reuse_equal_ids(name: str) -> None:
    try:
        real = load_tokenizer(resolve_model(name))
    except ModelLoadError as error:
        pytest.skip(str(error))
    real = replace(real, chat_template=real.chat_template or GEMMA)
    turns = [
        {"role": role, "content": f"{role} {number}: " + f"some words, {number} " * 40 + " <think>"}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    for count in range(1, len(turns), 2):
        messages = turns[:count]
        ids = encode_chat(real, messages)
        text = real.decode(ids, skip_special_tokens=False)
        assert real.backend.encode(text, add_special_tokens=False).ids == ids
    assert cut_pattern(real) is not None


def test_longer_conversation_encodes_only_new_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    one = tokenizer(backend("byte"))
    seen: list[str] = []

    def counting(made: Backend, text: str, **_: Any) -> list[int]:
        seen.append(text)
        return made.encode(text, add_special_tokens=False).ids

    monkeypatch.setattr(reuse, "encode_ids", counting)
    messages = [{"role": "user", "content": f"{number} " + "word " * 200} for number in range(9)]
    encode_chat(one, messages)
    earlier = [*seen]
    seen.clear()
    encode_chat(one, [*messages, {"role": "user", "content": "new"}])
    assert len(earlier) >= 9
    assert "".join(seen).count("<|im_start|>") <= 3
    assert "word" not in "".join(seen[1:])


@pytest.mark.parametrize(
    "more",
    [
        AddedToken("|><|", normalized=False),
        AddedToken("<|im_start|><|im_end|>", normalized=False),
        AddedToken("im_", normalized=False),
        AddedToken(">x", normalized=False),
        AddedToken("x<", normalized=True),
        AddedToken("word", single_word=True),
    ],
    ids=str,
)
def test_text_is_not_cut_at_tokens_that_may_overlap(more: AddedToken) -> None:
    made = backend("byte")
    made.add_tokens([more])
    assert cut_pattern(tokenizer(made)) is None


@pytest.mark.parametrize("change", [{"lstrip": True}, {"rstrip": True}, {"normalized": True}])
def test_text_is_not_cut_at_tokens_that_take_spaces(change: dict[str, bool]) -> None:
    made = Backend(models.BPE({"a": 0}, []))
    made.add_special_tokens([AddedToken("<|im_start|>", **({"normalized": False} | change))])
    assert cut_pattern(tokenizer(made)) is None


def test_memo_keeps_the_last_texts_within_its_size() -> None:
    asked: list[str] = []

    def length(text: str) -> "array[int]":
        asked.append(text)
        return array("I", [len(text)])

    a, b, c, d = (
        letter * count for letter, count in zip("abcd", (400, 400, 400, 1100), strict=True)
    )
    memo = Memo(length, most=1000)
    for text in (a, b, a, c, a, b, d, d):
        assert memo(text)[0] == len(text)
        assert sum(map(len, memo.kept)) <= 1000
    assert asked == [a, b, c, b, d, d]


def test_memo_serves_many_threads() -> None:
    memo = Memo(len, most=500)
    wrong: list[str] = []

    def work() -> None:
        for number in range(400):
            text = "x" * (number % 17)
            if memo(text) != len(text):
                wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < sum(map(len, memo.kept)) <= 500

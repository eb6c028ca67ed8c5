"""Text in pieces: joined pieces equal the text of all ids, and none is early or needlessly late."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from nano_inference.checkpoints.loading import resolve_model
from nano_inference.text.detokenizer import Detokenizer
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from tests.depth import at_depth
from tests.text import vocabularies
from tests.text.vocabularies import ALL, BYTE_LEVEL, BYTES, GEMMA, LLAMA, PIECES, byte_token

# Joined emoji, a flag, a skin tone, stacked marks, right-to-left, decomposed Hangul:
# characters of many parts.
CLUSTERS = [
    "👩‍👩‍👧",
    "🇨🇭",
    "👍🏽",
    "e\u0301\u0323",
    "שלום",
    "각",
    "🏴‍☠️",
    "a\u200bb",
    "\ufffd",
    "\U0001d518",
    "\r\n",
    "  ",
]
TEXT = st.lists(st.text(max_size=5) | st.sampled_from(CLUSTERS), max_size=6).map("".join)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    size = tokenizer.vocab_size
    one = st.integers(0, size + 2) | st.just(2**32 - 1)
    if (first := tokenizer.backend.token_to_id("<0x00>")) is not None:
        # Bytes that begin, continue and break a character: half of all ids, so that runs
        # occur.
        one |= st.sampled_from(
            [first + byte for byte in (0x41, 0x80, 0x9F, 0x98, 0xC3, 0xE2, 0xF0, 0xFF)]
        )
    return one


def portions(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(ids)])]


@st.composite
def split_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    return portions(draw, draw(st.lists(ids_of(tokenizer), max_size=14)))


@pytest.mark.thorough(cases=["True-bytes, then metaspace", "True-bytes, then ctc"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=at_depth(60), deadline=None)
@given(data=st.data())
def test_pieces_are_the_text_of_all_ids(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    parts = data.draw(split_ids(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [detokenizer.push(part) for part in parts]
    whole = tokenizer.decode(list(itertools.chain(*parts)), skip)
    assert "".join([*pieces, detokenizer.finish()]) == whole


@settings(max_examples=at_depth(80), deadline=None)
@given(text=TEXT, data=st.data())
def test_real_vocabulary_on_text(smollm2: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = smollm2.encode(text)
    detokenizer = Detokenizer(smollm2, skip_special_tokens=False)
    said = "".join(detokenizer.push(part) for part in portions(data.draw, ids))
    whole = smollm2.decode(ids, skip_special_tokens=False)
    if whole == text:  # the vocabulary lacks a few bytes of rare characters
        assert said == text, "whole characters are not held back"
    assert said + detokenizer.finish() == whole


@settings(max_examples=at_depth(80), deadline=None)
@given(data=st.data())
def test_real_vocabulary_on_any_ids(smollm2: Tokenizer, data: st.DataObject) -> None:
    parts = data.draw(split_ids(smollm2))
    detokenizer = Detokenizer(smollm2)
    said = "".join(detokenizer.push(part) for part in parts)
    assert said + detokenizer.finish() == smollm2.decode(list(itertools.chain(*parts)))


@settings(max_examples=at_depth(150), deadline=None)
@given(raw=st.binary(max_size=12), data=st.data())
# surrogates, overlong forms, beyond Unicode
@example(raw=b"\xed\xa0\x80\xe0\x80\xf4\x90\xc0\xaf", data=None)
def test_detokenizer_takes_any_bytes(raw: bytes, data: st.DataObject | None) -> None:
    """Cut invalid bytes at any place: Python and the library agree on the bytes of each U+FFFD."""
    ids = [BYTE_LEVEL.backend.token_to_id(character) for character in byte_level_characters(raw)]
    parts = [[token_id] for token_id in ids] if data is None else portions(data.draw, ids)
    detokenizer = Detokenizer(BYTE_LEVEL)
    text = "".join(detokenizer.push(part) for part in parts) + detokenizer.finish()
    assert text == BYTE_LEVEL.decode(ids) == raw.decode("utf-8", "replace")


def byte_level_characters(raw: bytes) -> str:
    """Find the characters of byte-level tokens by decoding every candidate character."""
    bare = decoders.ByteLevel()
    plain = {chr(code) for code in range(0x80)}
    found = {
        bytes([ord(character)]): character
        for character in plain
        if ord(character) not in range(0x21)
    }
    found.pop(b"\x7f", None)
    for code in range(0xA1, 0x200):
        # "Ã" followed by the character is one letter if that is a continuation byte, and so
        # on.
        for lead, base in (("Â", 0), ("Ã", 0x40)):
            text = bare.decode([lead + chr(code)])
            if len(text) == 1 and text != "\ufffd":
                found[bytes([ord(text) - base])] = chr(code)
        if len(text := bare.decode([chr(code)])) == 1 and text != "\ufffd" and ord(text) < 0x80:
            found[text.encode()] = chr(code)
        if bare.decode([chr(code)]) == "\ufffd" and 0xC0 <= code <= 0xFF:
            found[bytes([code])] = chr(code)
    return "".join(found[bytes([byte])] for byte in raw)


@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, LLAMA, GEMMA], ids=["byte level", "llama", "gemma"]
)
@settings(max_examples=at_depth(60), deadline=None)
@given(data=st.data())
def test_detokenizer_holds_back_only_text_that_may_change(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(ids_of(tokenizer), max_size=8))
    if tokenizer is BYTE_LEVEL:
        tails = [
            tokenizer.backend.token_to_id(character)
            for character in byte_level_characters(b"\x80\x90\xa0\xbf")
        ]
    else:
        tails = [byte_token(tokenizer, byte) for byte in (0x80, 0x90, 0xA0, 0xBF)]
        tails.append(byte_token(tokenizer, 0xFF))
    continuations = [
        tail for length in range(4) for tail in itertools.product(tails, repeat=length)
    ]
    continuations.append((tokenizer.backend.token_to_id("x"),))
    columns = zip(*(tokenizer.decode([*ids, *tail]) for tail in continuations), strict=False)
    common = "".join(
        column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    )
    said = Detokenizer(tokenizer).push(ids)
    assert common.startswith(said)
    # A literal U+FFFD belongs to the common text only after its run breaks.
    assert said.rstrip("\ufffd") == common.rstrip("\ufffd")


def test_spoilt_run_of_bytes_waits_no_longer() -> None:
    detokenizer = Detokenizer(GEMMA)
    smile = [byte_token(GEMMA, byte) for byte in "🙂".encode()]
    assert detokenizer.push(smile) == ""
    assert detokenizer.push([byte_token(GEMMA, 0xFF)]) == "\ufffd" * 5
    assert detokenizer.push(smile[:1]) == "\ufffd"
    assert detokenizer.push([PIECES.index("a"), *smile, PIECES.index("b")]) == "a🙂b"


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=at_depth(20), deadline=None)
@given(data=st.data())
def test_copies_are_independent(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    past, one, other = (data.draw(st.lists(ids_of(tokenizer), max_size=6)) for _ in range(3))
    first = Detokenizer(tokenizer)
    said = first.push(past)
    second = first.copy()
    texts = [said + first.push(one), said + second.push(other)]
    assert texts[0] + first.finish() == tokenizer.decode([*past, *one])
    assert texts[1] + second.finish() == tokenizer.decode([*past, *other])


@pytest.mark.parametrize("text", ["", " ", "  ", "   ", "a", " a ", "  a  ", "a   "])
@pytest.mark.parametrize("fused", [True, False])
def test_stripping_both_ends(text: str, fused: bool) -> None:
    """Strip everything: the library panics if nothing is left, and our result is empty."""
    chain = [decoders.Fuse(), decoders.Strip(" ", 1, 2)] if fused else [decoders.Strip(" ", 1, 2)]
    tokenizer = vocabularies.tokenizer([text, *PIECES], decoders.Sequence(chain))
    detokenizer = Detokenizer(tokenizer)
    token_id = tokenizer.backend.token_to_id(text)
    pieces = detokenizer.push([token_id]) + detokenizer.finish()
    assert pieces == text[text.startswith(" ") :].removesuffix(" ").removesuffix(" ")
    if "a" in text:
        assert pieces == tokenizer.decode([token_id])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("token_id", [-1, 2**32, 2**70, len(PIECES) + len(BYTES) + 4])
def test_ids_without_a_token_have_no_text(token_id: int, skip: bool) -> None:
    detokenizer = Detokenizer(LLAMA, skip)
    assert detokenizer.push([token_id, PIECES.index("▁a"), token_id, PIECES.index("▁a")]) == "a a"
    assert detokenizer.finish() == ""

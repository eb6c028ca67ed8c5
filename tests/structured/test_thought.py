"""Text before a grammar: a sample may think first, after a marker from the prompt or its own."""

import random
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from nano_inference import Grammar, InvalidRequest
from nano_inference.structured.mask_bits import may_draw
from nano_inference.text.token_texts import TokenTexts
from nano_inference.text.tokenizer import Tokenizer
from tests.depth import at_depth
from tests.structured.vocabularies import (
    EOS,
    accepts,
    accepts_ids,
    allowed,
    byte_tokenizer,
    state_of,
)

# Tokens that hold markers, parts of markers, and adjacent text.
PIECES = [
    "ab",
    "ba",
    "aba",
    "bab",
    "aab",
    "abb",
    "bb0",
    "ab0",
    "ba1",
    "a1",
    "0a",
    "abba",
    "ü",
    "üa",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    backend = tokenizer.backend
    backend.add_tokens([AddedToken(each, special=False) for each in PIECES])
    backend.add_special_tokens(["<think>"])
    return Tokenizer(backend, backend.get_vocab_size(), EOS, {}, None)


def behind(grammar: Grammar, text: str) -> str | None:
    """Return the part of a text under the grammar, or None if the thought is not over."""
    if not text.startswith(grammar.opened_by):
        return text
    _, marker, rest = text[len(grammar.opened_by) :].partition(grammar.after)
    return rest if marker else None


MARKERS = st.text("ab", min_size=1, max_size=4)
LANGUAGES = st.sampled_from(["[ab]{2}[01]", "[01]+", "a?b?[01]", "(ab|ba|ü)*0", ""])


@pytest.mark.thorough
@settings(max_examples=at_depth(200), deadline=None, derandomize=True)
@given(opened_by=st.just("") | MARKERS, after=MARKERS, language=LANGUAGES, seed=st.integers(0, 99))
def test_masked_draws_are_a_thought_and_a_text_of_the_grammar(
    opened_by: str, after: str, language: str, seed: int, tokenizer: Tokenizer
) -> None:
    language = language or f"{opened_by}[01]"  # it may begin like the thought
    grammar = Grammar("regex", language, after=after, opened_by=opened_by)
    state, rng, ids = state_of(grammar, tokenizer), random.Random(seed), list[int]()
    likely = [*(tokenizer.backend.token_to_id(each) for each in PIECES), *tokenizer.encode("ab01")]
    while not state.is_ended and len(ids) < 60:
        following = allowed(state.words)
        some = [each for each in likely if each in following]
        token_id = rng.choice(some if some and rng.random() < 0.9 else sorted(following))
        if EOS in following and rng.random() < 0.3:
            token_id = EOS
        state.accept(token_id)
        state.fill()
        assert state.problem is None
        ids.append(token_id)
    rest = behind(grammar, tokenizer.decode(ids[:-1], skip_special_tokens=False))
    if state.is_ended:
        assert rest is not None
        assert re.fullmatch(language, rest)


@settings(max_examples=at_depth(200), deadline=None, derandomize=True)
@given(
    opened_by=st.just("") | MARKERS,
    after=MARKERS,
    language=LANGUAGES,
    thought=st.text("ab0ü", max_size=6),
    answer=st.text("ab01ü", max_size=4),
    thinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_texts_can_be_drawn_in_any_tokens_after_a_thought(
    opened_by: str,
    after: str,
    language: str,
    thought: str,
    answer: str,
    thinks: bool,
    seed: int,
    tokenizer: Tokenizer,
) -> None:
    language = language or f"{opened_by}[01]"
    grammar = Grammar("regex", language, after=after, opened_by=opened_by)
    text = opened_by + thought + after + answer if thinks else answer
    rest = behind(grammar, text)
    expected = rest is not None and re.fullmatch(language, rest) is not None
    rng = random.Random(seed)
    said = text if rest is None else text[: len(text) - len(rest)]
    before = split(said, tokenizer, rng)
    if thinks and len(tokenizer.decode(before[: num_opening(opened_by, before, tokenizer)])) == len(
        said
    ):
        return  # one token held both markers, which is forbidden
    ids = [*before, *split(text[len(said) :], tokenizer, rng)]
    assert accepts_ids(state_of(grammar, tokenizer), ids) == expected


def num_opening(opened_by: str, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens up to the end of the opening marker."""
    some = range(len(ids) + 1)
    return next(n for n in some if tokenizer.decode(ids[:n]).startswith(opened_by))


def split(text: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Split a text into tokens in one of the possible ways, at random."""
    ids = list[int]()
    while text:
        some = [each for each in PIECES if text.startswith(each)]
        piece = rng.choice([*some, text[0]])
        ids += tokenizer.encode(piece) if piece in PIECES else one_by_one(piece, tokenizer)
        text = text[len(piece) :]
    return ids


def one_by_one(character: str, tokenizer: Tokenizer) -> list[int]:
    return [id_of_each_byte(tokenizer)[bytes([byte])] for byte in character.encode()]


@cache
def id_of_each_byte(tokenizer: Tokenizer) -> dict[bytes, int]:
    texts = TokenTexts(tokenizer)
    return {texts.bytes_of(token_id): token_id for token_id in range(3, 259)}


def test_marker_may_be_one_token_even_a_special_one(tokenizer: Tokenizer) -> None:
    grammar = Grammar("choice", '["yes", "no"]', after="</think>", opened_by="<think>")
    for text in ("yes", "<think>Well.</think>no", "<think></think>yes"):
        assert accepts(grammar, text, tokenizer), text
    (marker,) = tokenizer.encode("<think>")
    assert may_draw(state_of(grammar, tokenizer).words, marker)
    for text in (
        "<think>yes",
        "<think>Well.</think>",
        "<tyes",
        "</think>yes",
        " <think></think>no",
    ):
        assert not accepts(grammar, text, tokenizer), text


def test_sample_cannot_end_in_a_thought(tokenizer: Tokenizer) -> None:
    state = state_of(Grammar("regex", "a*", after="</think>", opened_by="<think>"), tokenizer)
    assert may_draw(state.words, EOS), "the grammar allows the empty text"
    for token_id in tokenizer.encode("<think>a</think"):
        state.accept(token_id)
        state.fill()
        assert not may_draw(state.words, EOS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"opened_by": "<think>"}, "opened_by='<think>' of a grammar requires `after`"),
        ({"after": "x" * 65}, "after of a grammar must have at most 64 bytes; got 65"),
        ({"after": "x", "opened_by": "\ud800"}, "opened_by=.* cannot be written as UTF-8"),
        ({"after": "x", "opened_by": 3}, "opened_by of a grammar must be a string, not 3"),
    ],
)
def test_bad_markers_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Grammar("regex", "a", **fields)

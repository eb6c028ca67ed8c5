"""A sample's text and stop strings, against a search of the whole text after every token."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.errors import InvalidRequest
from nano_inference.text.detokenizer import Detokenizer, OutputText
from nano_inference.text.tokenizer import Tokenizer
from tests.depth import at_depth
from tests.text.vocabularies import BYTE_LEVEL, GEMMA, LLAMA, PIECES, byte_token

# Few letters, so that stop strings overlap each other and themselves. Emoji in pieces, and U+FFFD
# from broken ones.
LETTERS = ["a", "b", "ab", "aaa", "x", "▁a", "a▁b▁", "ab xa", "aÃ", "🙂", "é", "\ufffd", ""]
STOP = st.text("ab x", min_size=1, max_size=5) | st.sampled_from(
    ["🙂", "é", "🙂a", "\ufffd", "\ufffda", "aaaa"]
)


@dataclass(frozen=True)
class Expected:
    """Result of a search of the whole text."""

    matched_at: int | None  # index of the token
    stop: str | None
    texts: list[str]  # after each token: the visible text, up to the match
    whole: str


def search(
    tokenizer: Tokenizer, ids: list[int], may_stop: list[bool], stops: tuple[str, ...]
) -> Expected:
    detokenizer = Detokenizer(tokenizer)
    texts: list[str] = []
    before = ""
    for index, token_id in enumerate(ids):
        text = before + detokenizer.push([token_id])
        hits = [
            (begin, -len(stop), stop)
            for stop in stops
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > len(before)
        ]
        if hits and may_stop[index]:
            begin, _, stop = min(hits)
            return Expected(index, stop, texts, text[:begin])
        begun = [k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])]
        texts.append(text[: len(text) - max(begun, default=0)])
        before = text
    return Expected(None, None, texts, tokenizer.decode(ids))


@st.composite
def samples(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    letters = [piece_id(tokenizer, piece) for piece in LETTERS]
    if tokenizer is BYTE_LEVEL:
        parts = [piece_id(tokenizer, character) for character in "ðŁĻĤÃ©"]
    else:
        parts = [byte_token(tokenizer, byte) for byte in "🙂é".encode()]
    any_id = st.integers(0, tokenizer.vocab_size + 1)
    pieces = st.sampled_from(
        [[token_id] for token_id in letters] + [parts[:4], parts[4:], parts[:3], parts[3:]]
    )
    chunks = draw(st.lists(pieces | st.lists(any_id, min_size=1, max_size=1), max_size=12))
    ids = [token_id for chunk in chunks for token_id in chunk]
    return ids, draw(st.lists(st.integers(0, 9).map(bool), min_size=len(ids), max_size=len(ids)))


@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, LLAMA, GEMMA], ids=["byte level", "llama", "gemma"]
)
@settings(max_examples=at_depth(200), deadline=None)
@given(data=st.data(), stops=st.lists(STOP, max_size=3).map(tuple))
def test_equal_to_a_search_of_the_whole_text(
    tokenizer: Tokenizer, stops: tuple[str, ...], data: st.DataObject
) -> None:
    ids, may_stop = data.draw(samples(tokenizer))
    expected = search(tokenizer, ids, may_stop, stops)
    output = OutputText(tokenizer, stops)
    taken = ""
    for index, token_id in enumerate(ids):
        stop = output.append(token_id, may_stop[index])
        assert stop == (expected.stop if index == expected.matched_at else None)
        if index == expected.matched_at:
            break
        assert output.text == expected.texts[index]
        if data.draw(st.booleans()):
            taken += output.take()
            assert taken == output.text
    taken += output.finish()
    assert taken == output.text == expected.whole
    assert output.finish() == output.take() == ""
    assert output.append(PIECES.index("a")) is None
    assert output.text == expected.whole


def feed(
    tokenizer: Tokenizer, pieces: list[str], stops: tuple[str, ...]
) -> tuple[OutputText, list[str | None]]:
    output = OutputText(tokenizer, stops)
    return output, [output.append(piece_id(tokenizer, piece)) for piece in pieces]


def piece_id(tokenizer: Tokenizer, piece: str) -> int:
    token_id = tokenizer.backend.token_to_id(piece)
    assert token_id is not None
    return token_id


def test_stop_string_matches_across_and_inside_tokens() -> None:
    output, stops = feed(GEMMA, ["x", "a", "b", "do not"], ("b do n",))
    assert stops == [None] * 4  # no space between the strings
    output, stops = feed(GEMMA, ["x", "a", "b", "▁", "do not"], ("b do n",))
    assert stops == [None] * 4 + ["b do n"]
    assert output.take() + output.finish() == output.text == "xa"


@pytest.mark.parametrize(
    ("pieces", "stops", "first", "text"),
    [
        (["x", "a", "ab"], ("b", "aab"), "aab", "x"),  # both end here
        (["x", "aaa"], ("a", "aa"), "aa", "x"),  # both begin here, the shorter one ends earlier
        (["x", "do not"], ("do", "o no"), "do", "x"),  # the first one wins, even if it is shorter
        (["x", "aaa", "b"], ("aab", "ab"), "aab", "xa"),
    ],
)
def test_stop_string_that_begins_first_wins_then_the_longest(
    pieces: list[str], stops: tuple[str, ...], first: str, text: str
) -> None:
    for order in (stops, stops[::-1]):
        output, found = feed(GEMMA, pieces, order)
        assert found == [None] * (len(pieces) - 1) + [first]
        assert output.finish() == text


def test_premature_match_never_counts() -> None:
    output = OutputText(GEMMA, ("aa", "aab"))
    a, b = piece_id(GEMMA, "a"), piece_id(GEMMA, "b")
    assert [output.append(a, False), output.append(a, False)] == [None, None]
    assert output.take() == "", "it may become the longer one"
    twin = output.copy()
    assert output.append(b) == "aab"
    assert (output.finish(), output.text) == ("", "")
    assert twin.append(a) == "aa", "it ends in the new text"
    assert twin.finish() == "a"


def test_flushed_characters_are_not_searched() -> None:
    for tokenizer, piece in ((BYTE_LEVEL, "Ã"), (GEMMA, "<0xC3>")):
        output, stops = feed(tokenizer, ["a", piece], ("\ufffd",))
        assert stops == [None, None]
        assert output.take() == "a"
        assert output.finish() == "\ufffd"
        assert output.text == "a\ufffd"


def test_incomplete_characters_wait_without_stop_strings() -> None:
    output, _ = feed(BYTE_LEVEL, ["a", "Ã"], ())
    assert (output.take(), output.text) == ("a", "a")
    output.append(piece_id(BYTE_LEVEL, "©"))
    assert (output.take(), output.text) == ("é", "aé")


@settings(max_examples=at_depth(50), deadline=None)
@given(data=st.data(), stops=st.lists(STOP, max_size=3).map(tuple))
def test_copies_are_independent(stops: tuple[str, ...], data: st.DataObject) -> None:
    past, one, other = (data.draw(samples(GEMMA))[0] for _ in range(3))
    first = OutputText(GEMMA, stops)
    for token_id in past:
        first.append(token_id)
    first.take()
    taken = first.text
    second = first.copy()
    for output, future in ((first, one), (second, other)):
        for token_id in future:
            output.append(token_id)
    for output, future in ((first, one), (second, other)):
        rest = output.finish()
        expected = search(GEMMA, [*past, *future], [True] * len([*past, *future]), stops)
        assert taken + rest == output.text == expected.whole


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        OutputText(GEMMA, ("a", ""))


def test_work_does_not_grow_with_the_text() -> None:
    """Bound the searched and the held-back text by the longest stop string, matched or not."""
    output = OutputText(GEMMA, ("aaab", "ab x"))
    longest = 0
    for _ in range(300):
        output.append(piece_id(GEMMA, "a"))
        longest = max(longest, len(output._held))
    assert longest == 3
    assert output.take() == "a" * 297

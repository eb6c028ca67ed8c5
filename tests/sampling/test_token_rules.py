"""Rules of a sample's own tokens, against rules that read the whole text each time."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.sampling.token_rules import BadWords, Rules, ThoughtBudget, TokenRules
from nano_inference.structured.mask_bits import mask_of, may_draw
from tests.depth import at_depth

# ids and their bytes: markers in pieces, markers as one token, pieces that hold more
PIECES = (b"<", b"t>", b"/", b"a", b"<t>", b"</t>", b"a<", b">", b"t", b"</t>a", b"a<t>", b"")
EOS = len(PIECES)
OPENS, CLOSES = b"<t>", b"</t>"
CLOSING_IDS = (0, 2, 1)  # "<", "/", "t>"
IDS = st.integers(0, EOS)
VOCAB = EOS + 1


def bytes_of(token_id: int) -> bytes:
    return b"</s>" if token_id == EOS else PIECES[token_id]


def budget(most: int, *, own_token: bool) -> ThoughtBudget:
    opens = (PIECES.index(OPENS),) if own_token else OPENS
    return ThoughtBudget(most, opens, CLOSES, CLOSING_IDS, frozenset([EOS]), bytes_of)


def spent_on_thought(ids: Sequence[int], *, own_token: bool) -> tuple[bool, int]:
    """Return if the last turn is within a thought, and its tokens of thought."""
    turn = list(ids)
    while EOS in turn:
        del turn[: turn.index(EOS) + 1]
    thinks, spent, text = False, 0, b""
    for token_id in turn:
        said = bytes_of(token_id)
        text += said
        if thinks and CLOSES in text:
            thinks, text = False, b""
        elif thinks:
            spent += 1
        elif own_token and token_id == PIECES.index(OPENS):
            thinks, text = True, b""
        elif not own_token and OPENS in text:
            text = text.partition(OPENS)[2]
            thinks = CLOSES not in text
            text = text if thinks else b""
    return thinks, spent


def rules_of(
    thought: ThoughtBudget | None = None, words: Sequence[tuple[int, ...]] = (), prompt: int = 0
) -> TokenRules:
    bad = BadWords(words) if words else None
    return TokenRules(Rules(mask_of(range(VOCAB)), thought, bad), prompt)


def allowed(words: np.ndarray | None) -> set[int]:
    return {each for each in range(VOCAB) if words is None or may_draw(words, each)}


@settings(max_examples=at_depth(300), deadline=None)
@given(ids=st.lists(IDS, max_size=30), most=st.integers(0, 4), own_token=st.booleans())
def test_budget_forces_the_marker_after_its_tokens(
    ids: list[int], most: int, own_token: bool
) -> None:
    thinks, spent = spent_on_thought(ids, own_token=own_token)
    forced = rules_of(budget(most, own_token=own_token)).forced(ids)
    assert bool(forced) == (thinks and spent >= most)
    if forced:
        begun = len(CLOSING_IDS) - len(forced)
        assert forced == CLOSING_IDS[begun:]
        assert tuple(ids[len(ids) - begun :]) == CLOSING_IDS[:begun]


@settings(max_examples=at_depth(200), deadline=None)
@given(
    ids=st.lists(IDS, max_size=30), most=st.integers(0, 4), own_token=st.booleans(), data=st.data()
)
def test_rules_depend_on_ids_alone(
    ids: list[int], most: int, own_token: bool, data: st.DataObject
) -> None:
    words = data.draw(st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3))
    prompt = data.draw(st.integers(0, len(ids)))
    thought = budget(most, own_token=own_token)
    rules = rules_of(thought, words, prompt)
    for _ in range(4):  # jumps forward and back, drafts, and forks
        end = data.draw(st.integers(prompt, len(ids)))
        known = data.draw(st.integers(prompt, end))
        fresh = rules_of(thought, words, prompt).mask(ids[:end])
        assert allowed(rules.mask(ids, ids[known:end], end=known)) == allowed(fresh)
        rules = data.draw(st.sampled_from([rules, rules.fork()]))


@settings(max_examples=at_depth(200), deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), max_size=12),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1),
    prompt=st.integers(0, 12),
)
def test_last_id_of_a_bad_word_is_banned_in_the_completion(
    ids: list[int], words: list[tuple[int, ...]], prompt: int
) -> None:
    prompt = min(prompt, len(ids))
    completion = tuple(ids[prompt:])
    banned = {
        word[-1]
        for word in words
        if completion[len(completion) - len(word) + 1 :] == word[:-1]
        and len(word) <= len(completion) + 1
    }
    assert allowed(rules_of(None, words, prompt).mask(ids)) == set(range(VOCAB)) - banned


@settings(max_examples=at_depth(100), deadline=None)
@given(ids=st.lists(IDS, max_size=12), drafts=st.lists(IDS, max_size=6), most=st.integers(0, 3))
def test_drafts_stop_before_the_first_forbidden_one(
    ids: list[int], drafts: list[int], most: int
) -> None:
    rules = rules_of(budget(most, own_token=False), [(3, 3), (4,)])
    count = rules.num_allowed(ids, drafts)
    for index in range(count):
        assert drafts[index] in allowed(rules.mask([*ids, *drafts[:index]]))
        rules = rules.fork()
    rules = rules_of(budget(most, own_token=False), [(3, 3), (4,)])
    if count < len(drafts):
        assert drafts[count] not in allowed(rules.mask([*ids, *drafts[:count]]))

"""Drafts of text sources, without a model."""

from itertools import count
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference import SamplingParams
from nano_inference.config import Speculation
from nano_inference.core.sequence import CheckedRequest, Sequence, SequenceStatus
from nano_inference.drafts.history import HistoryDrafts
from nano_inference.drafts.sources import TEXT_SOURCES
from nano_inference.drafts.suffix import LONGEST_MATCH, MOST_READ, SuffixDrafts, SuffixIndex

IDS = count()


def sequence(
    tokens: list[int],
    prompt: int = 2,
    request_id: int = 0,
    seed: int = 0,
    sample: int = 0,
    salt: str | None = None,
    adapter: str | None = None,
) -> Sequence:
    params = SamplingParams(cache_salt=salt, adapter=adapter)
    request = CheckedRequest(request_id, prompt, params, seed=seed)
    return Sequence(next(IDS), request, tokens, sample_index=sample)


def guess(source: SuffixDrafts | HistoryDrafts, seq: Sequence, most: int = 4) -> list[int]:
    (draft,) = source.propose([seq], most)
    assert len(draft.token_ids) == len(draft.kinds) <= most
    return list(draft.token_ids)


def test_ngram_drafts_its_earlier_continuation() -> None:
    source = SuffixDrafts(siblings=False)
    seq = sequence([7, 1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert guess(source, seq) == [4, 5, 9, 1]
    seq.token_ids.append(8)  # never seen
    assert guess(source, seq) == []
    seq.token_ids += [1, 2]
    assert guess(source, seq, 1) == [3]


def test_longest_match_wins_then_the_most_frequent() -> None:
    source = SuffixDrafts(siblings=False)
    assert guess(source, sequence([5, 1, 2, 7, 6, 1, 2, 8, 6, 1, 2]), 1) == [8]  # 6 1 2, not 1 2
    assert guess(source, sequence([1, 2, 7, 1, 2, 8, 1, 2, 7, 0, 1, 2]), 1) == [7]


def test_siblings_are_searched_if_enabled() -> None:
    one, other = sequence([1, 2, 5, 6, 7, 8]), sequence([1, 2, 9, 5, 6])
    foreign = sequence([3, 4, 5, 6, 11], request_id=1)
    for siblings, expected in ((True, [7, 8]), (False, [])):
        source = SuffixDrafts(siblings)
        first = source.propose([one, foreign, other], 2)
        assert list(first[2].token_ids) == expected


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 5))
def test_suffix_is_found_at_any_position(tokens: list[int], pieces: int) -> None:
    """Compare with a search through the whole text, which may have grown piece by piece."""
    index, text = SuffixIndex(), list[int]()
    for start in range(0, len(tokens), pieces):
        text += tokens[start : start + pieces]
        index.add(text)
        length, places = index.find(text)
        before = text[:-1]
        longest = 0
        for at in range(1, len(before) + 1):
            common = 0
            while common < min(at, LONGEST_MATCH) and before[at - 1 - common] == text[-1 - common]:
                common += 1
            longest = max(longest, common)
        newest = 8  # remembered positions per pair
        if len(text) <= newest:
            assert length == longest
        assert length <= longest
        assert bool(places) == bool(longest)
        for other, at in places:
            assert other[at - length : at] == text[-length:]


def test_ended_sequences_are_dropped_and_memory_is_bounded() -> None:
    source = SuffixDrafts(most_entries=300)
    for request_id in range(50):
        seq = sequence(list(range(100)), request_id=request_id)
        source.propose([seq], 4)
        if request_id % 2:
            seq.status = SequenceStatus.FINISHED
    assert sum(group.index.num_entries for group in source._groups.values()) <= 300


def test_sibling_with_equal_noise_is_followed_until_it_differs() -> None:
    source = HistoryDrafts()
    source.keep(sequence([1, 2, 5, 6, 7, 8, 9], seed=3), version=0)
    seq = sequence([1, 2], seed=3)
    assert guess(source, seq, 3) == [5, 6, 7]
    seq.token_ids += [5, 6]
    assert guess(source, seq, 3) == [7, 8, 9]
    seq.token_ids += [0]
    assert guess(source, seq) == []
    seq.token_ids += [8]  # at the other sample's position
    assert guess(source, seq) == [9]
    assert guess(source, sequence([1, 2, 6], seed=4)) == [7, 8, 9]  # other noise: match by text
    assert guess(source, sequence([1, 3, 6], seed=3)) == []  # another prompt
    assert guess(source, sequence([1, 2, 6], seed=3, salt="another's")) == []
    assert guess(source, sequence([1, 2, 6], seed=3, adapter="another")) == []


def test_history_is_bounded() -> None:
    source = HistoryDrafts(most_tokens=40, most_samples=3)
    for sample in range(6):
        source.keep(sequence([1, 2, *range(8)], sample=sample), version=0)
    assert source.num_tokens == 30
    source.keep(sequence([4, 4, *range(18)]), version=0)
    assert source.num_tokens == 20
    source.keep(sequence([4, 4, *range(9)]), version=1)  # at the position of the same sample
    assert source.num_tokens == 11


def test_evicted_history_leaves_the_index() -> None:
    source = HistoryDrafts(most_samples=2)
    for sample in range(9):
        tokens = list(range(10 * sample, 10 * sample + 9))
        source.keep(sequence([1, 2, *tokens], sample=sample), version=0)
    (pasts,) = source._prompts.values()
    assert pasts.index.num_entries <= 2 * 4 * 9
    assert guess(source, sequence([1, 2, 83], sample=99), 2) == [84, 85]
    assert guess(source, sequence([1, 2, 13], sample=99), 2) == []


def test_long_text_is_indexed_over_several_steps() -> None:
    source = SuffixDrafts()
    text = [*range(3 * MOST_READ), 5, 6]
    seq = sequence(text, prompt=len(text))
    (group,) = [source._group(seq)]
    sizes: list[int] = []
    for _ in range(5):
        assert guess(source, seq, 2) == [7, 8]
        sizes.append(len(group.index._tokens))
    assert sizes == [MOST_READ, 2 * MOST_READ, 3 * MOST_READ, 3 * MOST_READ, 3 * MOST_READ]


@pytest.mark.parametrize("source", [SuffixDrafts(), HistoryDrafts()])
def test_short_texts_have_no_suffix(source: SuffixDrafts | HistoryDrafts) -> None:
    assert guess(source, sequence([1], prompt=1)) == []
    assert guess(source, sequence([1, 2])) == []


def test_speculation_values_all_have_sources() -> None:
    assert TEXT_SOURCES.keys() == set(get_args(Speculation))

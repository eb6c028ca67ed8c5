"""Turns as token ids: what stays of earlier turns, and who may ask."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference import SamplingParams, TrainingSample, VersionSpan
from nano_inference.errors import InvalidRequest
from nano_train.turns import Rollout, joined

END = 2
WORDS = st.lists(st.integers(3, 9), min_size=1, max_size=5)


def turn(prompt: list[int], says: list[int], **more: Any) -> TrainingSample:
    values = tuple(-0.5 - at for at in range(len(says)))
    span = (VersionSpan(4, 0, len(says)),)
    return replace(
        TrainingSample(tuple(prompt), tuple(says), values, None, 4, "stop"),
        **{"weight_versions": span, "loss_mask": (True,) * len(says)} | more,
    )


@given(
    question=WORDS,
    turns=st.lists(st.tuples(WORDS, WORDS, WORDS, st.booleans()), min_size=1, max_size=4),
)
def test_turns_keep_the_sampled_tokens(question: list[int], turns: list[Any]) -> None:
    """The chat is rendered with other tokens for each answer than the sampled ones."""
    rollout, rendered, kept = Rollout(SamplingParams()), question, question
    for said, written, answer, ends in turns:
        assert rollout.begin(rendered, (END, 1)) == kept
        says = [*said, END] if ends else said
        rollout.end(turn(kept, says))
        rendered = [*rendered, *written, END, *answer]
        kept = [*kept, *said, END, *answer]
    sample = joined(rollout.turns)
    assert [*sample.prompt_tokens] == question
    assert [*sample.prompt_tokens, *sample.completion_tokens] == [
        *rollout.turns[-1].prompt_tokens,
        *rollout.turns[-1].completion_tokens,
    ]
    drawn = [
        one for one, own in zip(sample.completion_tokens, sample.loss_mask, strict=True) if own
    ]
    assert drawn == [token for one in rollout.turns for token in one.completion_tokens]
    logprobs = [one for one, own in zip(sample.logprobs, sample.loss_mask, strict=True) if own]
    assert logprobs == [value for one in rollout.turns for value in one.logprobs]
    assert sample.weight_versions == (VersionSpan(4, 0, len(sample.completion_tokens)),)


@pytest.mark.parametrize(
    "rendered",
    [[5, 7, 9, END, 4], [5, 6, 9, 9, 4], [5]],
    ids=["another past", "an answer without end", "a shorter chat"],
)
def test_chat_must_continue_the_last_turn(rendered: list[int]) -> None:
    rollout = Rollout(SamplingParams())
    rollout.end(turn(rollout.begin([5, 6], (END,)), [8, END]))
    with pytest.raises(InvalidRequest, match="does not continue the last turn"):
        rollout.begin(rendered, (END,))
    assert rollout.begin([5, 6, 9, END, 4], (END,)) == [5, 6, 8, END, 4]


def test_rollout_has_one_turn_at_a_time() -> None:
    rollout = Rollout(SamplingParams())
    prompt = rollout.begin([5, 6], (END,))
    with pytest.raises(InvalidRequest, match="a turn of this rollout is open"):
        rollout.begin([5, 6], (END,))
    rollout.end(turn(prompt, [8], finish_reason="abort"))
    assert rollout.begin([5, 6], (END,)) == prompt
    rollout.end(None)
    assert not rollout.turns

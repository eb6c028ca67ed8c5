"""Choices: any grouping of an engine's deltas gives the same tokens and values."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.remote.messages import Generate
from nano_inference.server.api.shared.choices import ChoiceDelta, new_choice
from nano_inference.types import Delta, SamplingParams
from tests.depth import at_depth
from tests.server.scripted import Script, ScriptedClient, _Sample

COLUMNS = ("token_ids", "logprobs", "top_logprobs", "raw_logprobs", "log_kept_mass")
PARAMS = SamplingParams(max_tokens=9, top_logprobs=2, raw_logprobs=True, stop=("nothing like it",))


@pytest.fixture(scope="module")
def deltas() -> list[Delta]:
    """Return the deltas of nine tokens, one each, and of the end."""
    request = Generate(0, [1, 2], PARAMS, stream=True)
    sample = _Sample(
        request, 0, Script("One two three four five six seven."), ScriptedClient().tokenizer
    )
    sample.token_ids[:] = sample.token_ids[:9]
    made = [
        replace(
            sample.delta(at, at + 1),
            logprobs=(-0.5 - at,),
            raw_logprobs=(-10.5 - at,),
            log_kept_mass=(-0.1 * at,),
        )
        for at in range(9)
    ]
    return [*made, sample.last()]


@settings(max_examples=at_depth(40), deadline=None)
@given(data=st.data())
def test_deltas_that_are_joined_keep_their_order_in_every_column(
    data: st.DataObject, deltas: list[Delta]
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(deltas) - 1))))
    choice = new_choice(0, None, PARAMS.stop, frozenset(), None)
    ends = [*cuts, len(deltas)]
    pieces = [choice.push(deltas[begin:end]) for begin, end in zip([0, *cuts], ends, strict=True)]

    def column(found: list[ChoiceDelta], name: str) -> list[object]:
        return [each for piece in found for each in getattr(piece, name) or ()]

    for name in COLUMNS:
        assert column(pieces, name) == [
            each for delta in deltas for each in getattr(delta, name) or ()
        ], name
        assert len(column(pieces, name)) == 9
    assert choice.content == "".join(delta.text or "" for delta in deltas)
    assert choice.finished is deltas[-1].finished

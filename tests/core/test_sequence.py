"""`Sequence`: fields that moved to its request."""

import pytest

from nano_inference.core.sequence import CheckedRequest, Sequence
from nano_inference.types import SamplingParams


def test_sequence_error_points_to_the_request_field() -> None:
    seq = Sequence(0, CheckedRequest(3, 1, SamplingParams(max_tokens=2)), [5])
    assert seq.request_id == 3
    for name in ("seed", "params", "num_prompt_tokens"):
        with pytest.raises(AttributeError, match=r"read them from sequence\.request"):
            getattr(seq, name)
    with pytest.raises(AttributeError, match="'Sequence' object has no attribute 'sede'"):
        _ = getattr(seq, "sede")  # noqa: B009


def test_sequence_has_no_hook_that_slows_its_attributes() -> None:
    assert not hasattr(Sequence, "__getattr__")  # it slows a step by a fifth

"""`Sequence`: names that moved to its request."""

import pytest

from nano_inference.core.sequence import CheckedRequest, Sequence
from nano_inference.types import SamplingParams


def test_sequence_names_where_a_field_of_the_request_is() -> None:
    seq = Sequence(0, CheckedRequest(3, 1, SamplingParams(max_tokens=2)), [5])
    assert seq.request_id == 3
    with pytest.raises(
        AttributeError, match=r"no attribute 'seed'; read sequence\.request\.seed\."
    ):
        _ = getattr(seq, "seed")  # noqa: B009
    with pytest.raises(AttributeError, match=r"no attribute 'sede'\.$"):
        _ = getattr(seq, "sede")  # noqa: B009

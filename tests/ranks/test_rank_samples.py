"""Samples sent from the last stage to rank 0."""

import math
import threading
import time

import pytest

pytest.importorskip("msgspec")

import msgspec

from nano_inference.core.apply import SampledTokens
from nano_inference.errors import RankLost
from nano_inference.ranks.samples import SampleQueue, Samples, from_message, to_message


def tokens(first: int, **more: object) -> SampledTokens:
    thirds = [-1 / 3, -math.inf]
    return SampledTokens([first, 2**40], thirds, [0.1, 5e-324], [0.0, -0.0], **more)  # pyright: ignore


@pytest.mark.parametrize("full", [False, True])
def test_samples_round_trip_bit_for_bit(full: bool) -> None:
    more = {
        "masks": [(1, 2), ()],
        "top": [([7, 8], [-0.25, -math.inf]), ([9, 1], [-0.5, -1 / 3])],
        "scores": [-0.1, -math.inf],
        "score_best": [([3], [-0.75])],
    }
    sent = tokens(4, **(more if full else {}))
    data = msgspec.msgpack.encode(to_message(sent))
    actual = from_message(msgspec.msgpack.decode(data, type=Samples))
    assert (list(actual.token_ids), actual.logprobs, actual.raw_logprobs) == (
        [4, 2**40],
        sent.logprobs,
        sent.raw_logprobs,
    )
    assert [math.copysign(1, x) for x in actual.log_kept_mass] == [1, -1]
    assert (None if actual.masks is None else list(map(tuple, actual.masks))) == sent.masks
    assert list(actual.scores) == list(sent.scores)
    assert [list(map(tuple, row)) for row in actual.top or ()] == [
        list(map(tuple, row)) for row in sent.top or ()
    ]
    assert [list(map(tuple, row)) for row in actual.score_best] == [
        list(map(tuple, row)) for row in sent.score_best
    ]


def test_nan_payload_survives() -> None:
    sent = SampledTokens([1], [math.nan], [math.nan], [0.0])
    assert math.isnan(from_message(to_message(sent)).logprobs[0])


def test_steps_may_be_waited_for_in_any_order() -> None:
    samples = SampleQueue(5.0)
    steps = [samples.expect() for _ in range(3)]
    for first in range(3):
        samples.put(to_message(tokens(first)))
    assert [steps[index].wait().token_ids[0] for index in (1, 0, 2)] == [1, 0, 2]


def test_wait_ends_at_its_deadline() -> None:
    with pytest.raises(RankLost, match="no samples within"):
        SampleQueue(0.05).expect().wait()


def test_wait_ends_when_a_rank_is_lost() -> None:
    lost: list[RankLost] = []
    samples = SampleQueue(30.0, lambda: lost[0] if lost else None)

    def lose() -> None:
        time.sleep(0.05)
        lost.append(RankLost("rank 1 ended by signal 9"))
        samples.wake()

    threading.Thread(target=lose).start()
    began = time.monotonic()
    with pytest.raises(RankLost, match="signal 9"):
        samples.expect().wait()
    assert time.monotonic() - began < 5

"""`FleetRequest` without a fleet: it reports the new tokens of a delta."""

import pytest

from nano_inference.fleet.errors import WeightsChanged
from nano_inference.fleet.requests import FleetRequest
from nano_inference.fleet.router import Ticket
from nano_inference.remote.messages import Generate, Resume
from nano_inference.remote.open_requests import Receiver
from nano_inference.types import Delta, SamplingParams
from tests.server.scripted import Script, ScriptedClient

PARAMS = SamplingParams(max_tokens=8, seed=1, top_k=5, sampling_mask=True)


class Replies:
    name = None

    def put(self, delta: Delta) -> None: ...

    def fail(self, problem: Exception) -> None: ...


class Replica(ScriptedClient):
    """Replica that accepts requests and never answers."""

    def begin(self, receiver: Receiver, message: Generate | Resume, num_samples: int) -> int:
        return 0


def request_of(stream: bool = True) -> FleetRequest:
    return FleetRequest(Generate(1, [5], PARAMS, stream=stream), None, None, "cpu")


def delta_of(*token_ids: int) -> Delta:
    logprobs = tuple(-0.5 for _ in token_ids)
    return Delta(0, 0, token_ids, logprobs, "x" * len(token_ids), log_kept_mass=logprobs)


def test_fleet_request_returns_the_new_tokens_of_a_repetition() -> None:
    request, replica = request_of(), Replica(Script([]))
    assert request.hear(delta_of(1, 2))
    assert not request.hear(delta_of(1, 2)), "it is the first once after each hand-over"
    assert request.take(delta_of(1, 2)) == delta_of(1, 2)
    request.hand_to(replica, Ticket("1", 1), Replies())
    assert request.hear(delta_of(1))
    assert request.take(delta_of(1)) is None
    assert request.take(delta_of(2, 3)) == delta_of(3)
    assert request.samples[0].token_ids == [1, 2, 3]


def test_fleet_request_raises_if_a_repetition_differs() -> None:
    request = request_of()
    request.take(delta_of(1, 2))
    request.hand_to(Replica(Script([])), Ticket("1", 1), Replies())
    with pytest.raises(WeightsChanged):
        request.take(delta_of(1, 9))
    assert request.samples[0].token_ids == [1, 2]


def test_fleet_request_keeps_tokens_its_client_does_not_stream() -> None:
    request = request_of(stream=False)
    assert request.take(delta_of(1, 2)) is None
    assert request.has_begun

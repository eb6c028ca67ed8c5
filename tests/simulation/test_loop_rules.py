"""Rules of the loop between two decisions."""

import pytest

from nano_inference.config import SchedulerConfig
from nano_inference.core.loop import Add, EngineLoop, LoopHooks, UpdatesGivenUp
from nano_inference.core.sequence import POLICY, CheckedRequest, Sequence
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.types import SamplingParams
from tests.simulation.fake_model import (
    EOS,
    FakeRunner,
    FakeUpdate,
    FakeWeights,
    oracle,
    queue_update,
)


def loop_with(prompts: list[list[int]], lookahead: int, max_tokens: int = 10) -> EngineLoop:
    runner = FakeRunner(200, 4)
    runner.one_version_only = False
    loop = EngineLoop(
        *(PagedKVCache(50, 4), runner, SchedulerConfig(block_size=4), lookahead, "fake"),
        LoopHooks(weights=FakeWeights(runner)),
    )
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens)
        stop = frozenset([EOS])
        loop.inbox.append(
            Add(
                Sequence(
                    loop.sequences.new_id(),
                    CheckedRequest(index, len(prompt), params, stop),
                    prompt,
                )
            )
        )
    return loop


def ending_early() -> list[int]:
    """Return a prompt whose sample stops by itself after 2 to 9 tokens."""
    return next([first, 2] for first in range(1, 11) if 1 < len(oracle([first, 2], 0, 0, 10)) < 8)


def test_overrun_of_a_stopped_sequence_is_discarded() -> None:
    prompt = ending_early()
    loop = loop_with([list(prompt)], lookahead=1)
    samples = []
    while loop.has_pending():
        samples += loop.step()
        loop.check()
    expected = oracle(prompt, 0, 0, 10)
    assert list(samples[0].completion_tokens) == expected
    assert samples[0].finish_reason == "stop"
    assert isinstance(loop.runner, FakeRunner)
    assert loop.runner.tokens_computed == len(prompt) + len(expected), (
        "one chunk past the stop token, no more"
    )


def test_weights_change_only_without_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_with([[1, 2, 3], [4, 5]], lookahead=1, max_tokens=6)
    loop.step()
    assert loop.in_flight
    seen: list[int] = []
    apply = loop.weights.apply

    def noted(update: FakeUpdate, *, keep_old: bool) -> int | None:
        seen.append(len(loop.in_flight))
        return apply(update, keep_old=keep_old)

    monkeypatch.setattr(loop.weights, "apply", noted)
    queue_update(loop, 1, "keep")
    assert loop.has_pending()
    loop.step()
    assert seen == [0]
    assert loop.sequences.versions == {POLICY: 1}


def test_pending_work_is_waiting_running_in_flight_or_posted() -> None:
    loop = loop_with([[1, 2]], lookahead=1, max_tokens=1)
    assert loop.has_pending()  # posted, not yet read
    assert loop.step() == []
    assert loop.in_flight
    assert loop.has_pending()
    assert len(loop.step()) == 1
    assert not loop.has_pending()


def add(loop: EngineLoop, request_id: int) -> Sequence:
    """Post one more request."""
    request = CheckedRequest(request_id, 2, SamplingParams(max_tokens=6), frozenset([EOS]))
    sequence = Sequence(loop.sequences.new_id(), request, [7, 8])
    loop.inbox.append(Add(sequence))
    return sequence


def test_requests_posted_before_an_update_precede_it() -> None:
    """The update is queued before the loop reads any message."""
    loop = loop_with([[1, 2, 3]], lookahead=0)
    loop.step()
    before = add(loop, 1)
    queue_update(loop, 1, "wait")
    after = add(loop, 2)
    loop.handle()
    assert (before.behind, after.behind) == (None, 1)
    assert loop.sequences.waiting == [before]
    assert loop.sequences.held == [after]
    assert loop.would_wait("recompute")


def test_withdrawn_update_releases_the_requests_after_it() -> None:
    loop = loop_with([[1, 2, 3]], lookahead=0)
    loop.step()
    given_up = queue_update(loop, 1, "wait")
    first = add(loop, 1)
    loop.handle()
    assert loop.sequences.held == [first]
    loop.weights.pending.remove(given_up)
    loop.inbox.append(UpdatesGivenUp())
    queue_update(loop, 1, "wait")  # its version is free again
    second = add(loop, 2)
    loop.handle()
    assert (first.behind, second.behind) == (None, 1)
    assert first in loop.sequences.waiting
    assert loop.sequences.held == [second]


def test_update_cancelled_before_its_message_is_never_applied() -> None:
    loop = loop_with([[1, 2, 3]], lookahead=0)
    loop.weights.pending.remove(queue_update(loop, 1, "keep"))
    loop.inbox.append(UpdatesGivenUp())
    loop.step()
    assert loop.ready_update() is None
    assert loop.sequences.versions == {POLICY: 0}

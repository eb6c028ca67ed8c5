"""Rules of the loop itself: what lies between two decisions."""

from nano_inference.config import SchedulerConfig
from nano_inference.core.loop import Add, ChangeWeights, EngineLoop
from nano_inference.core.sequence import POLICY, CheckedRequest, Sequence
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.types import SamplingParams
from tests.simulation.fake_model import EOS, FakeRunner, oracle


def loop_with(prompts: list[list[int]], lookahead: int, max_tokens: int = 10) -> EngineLoop:
    loop = EngineLoop(
        PagedKVCache(50, 4), FakeRunner(200, 4), SchedulerConfig(block_size=4), lookahead, "fake"
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
    """A prompt whose sample stops by itself well before 10 tokens, and after more than one."""
    return next([first, 2] for first in range(1, 11) if 1 < len(oracle([first, 2], 0, 0, 10)) < 8)


def test_the_overrun_of_a_stopped_sequence_is_discarded() -> None:
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


def test_weights_change_only_with_nothing_in_flight() -> None:
    loop = loop_with([[1, 2, 3], [4, 5]], lookahead=1, max_tokens=6)
    loop.step()
    assert loop.in_flight
    seen: list[int] = []

    def write() -> int:
        seen.append(len(loop.in_flight))
        return 1

    loop.inbox.append(ChangeWeights(POLICY, write, "keep"))
    assert loop.has_pending()
    loop.step()
    assert seen == [0]
    assert loop.sequences.versions == {POLICY: 1}


def test_pending_work_is_waiting_running_in_flight_or_in_the_inbox() -> None:
    loop = loop_with([[1, 2]], lookahead=1, max_tokens=1)
    assert loop.has_pending()  # in the inbox
    assert loop.step() == []
    assert loop.in_flight
    assert loop.has_pending()
    assert len(loop.step()) == 1
    assert not loop.has_pending()

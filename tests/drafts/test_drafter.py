"""The number of drafts per step, its learning rule, and misbehaving sources."""

import logging
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, SchedulerConfig
from nano_inference.core.sequence import CheckedRequest, Sequence, Sequences, SequenceStatus
from nano_inference.drafts.costs import StepCosts
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.source import Guess, Watched
from nano_inference.drafts.sources import GUESSED
from tests.models.tiny import tiny_llama

FREE = StepCosts((1, 2, 4, 8), (1.0, 1.0, 1.0, 1.0))
DEAR = StepCosts((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0))
TILES = StepCosts((1, 2, 3, 4, 8), (1.0, 1.0, 1.5, 1.5, 2.5))
CONFIG = SchedulerConfig(max_batch_size=16, max_drafts=4)


class Always:
    """Propose the same drafts for every sequence."""

    def __init__(self, token_ids: Listed[int], kind: int = 0, name: str = "always") -> None:
        self.name, self._guess = name, Guess(token_ids, [kind] * len(token_ids))
        self.num_asked = 0

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        self.num_asked += 1
        return [Guess(*(part[:most] for part in self._guess)) for _ in seqs]


def live(num_seqs: int = 1) -> Sequences:
    sequences = Sequences()
    for number in range(num_seqs):
        request = CheckedRequest(number, 3, SamplingParams(max_tokens=50))
        seq = Sequence(sequences.new_id(), request, [1, 2, 3])
        seq.num_computed_tokens, seq.status = 2, SequenceStatus.RUNNING
        sequences.insert(seq)
    return sequences


def draw(
    drafter: Drafter, sequences: Sequences, token_ids: list[int], times: int = 1
) -> list[tuple[int, ...]]:
    """Run steps in which every sequence samples these tokens, cut to its number of drafts. Return
    the drafts of the first sequence.
    """
    drawn_drafts: list[tuple[int, ...]] = []
    for _ in range(times):
        drafts = drafter.propose(sequences, (), CONFIG)
        for seq in sequences.running:
            seq.token_ids += token_ids[: len(drafts.get(seq.seq_id, ())) + 1]
            seq.num_computed_tokens = len(seq.token_ids) - 1
        drafter.learn(sequences.running, drafts)
        drawn_drafts.append(drafts.get(sequences.running[0].seq_id, ()))
        for seq in sequences.running:
            del seq.token_ids[3:]
            seq.num_computed_tokens = 2
    return drawn_drafts


def test_free_drafts_are_all_computed() -> None:
    assert draw(Drafter([Always([7, 8, 9, 6, 5])], FREE, 2), live(), [0]) == [(7, 8)]


def test_drafts_are_skipped_if_they_do_not_pay() -> None:
    source = Always([7, 8])
    drafter = Drafter([source], DEAR, 4)
    assert draw(drafter, live(8), [7, 8, 9], times=30) == [()] * 30
    assert source.num_asked == 0  # no acceptance rate would make them pay
    assert drafter.stats().num_drafted == 0


def test_draft_length_follows_past_acceptance() -> None:
    wrong, right = Drafter([Always([7] * 4)], TILES, 4), Drafter([Always([7] * 4)], TILES, 4)
    drafts = draw(wrong, live(), [0], times=40)
    assert drafts[0][:1] == drafts[10][:1] == (7,)  # the second row of a tile is free
    assert drafts[-1] == ()  # except for the host
    assert draw(right, live(), [7] * 9, times=40)[-1] == (7,) * 4
    stats = wrong.stats()
    assert 10 < stats.drafted["always"][0] < 40
    assert stats.accepted["always"] == (0,) * len(stats.drafted["always"])
    assert sum(right.stats().accepted["always"]) == sum(right.stats().drafted["always"])


def test_skipped_drafts_still_update_the_statistics() -> None:
    """The first draft costs half a step. It pays once its accuracy is known."""
    costs = StepCosts((1, 2, 3), (1.0, 1.6, 2.2))
    drafter = Drafter([Always([7, 7])], costs, 2)
    drafts = draw(drafter, live(), [7], times=40)
    assert drafts[0] == ()
    assert drafts[-1] != ()


def test_accurate_source_gets_longer_drafts() -> None:
    drafter = Drafter([Always([7] * 3, name="one"), Always([8] * 3, name="other")], FREE, 3)
    assert draw(drafter, live(), [8] * 4, times=40)[-1] == (8, 8, 8)


def test_sequences_with_a_token_in_flight_have_no_drafts() -> None:
    drafter, sequences = Drafter([Always([7])], FREE, 4), live(2)
    first, second = sequences.running
    assert list(drafter.propose(sequences, {first.seq_id}, CONFIG)) == [second.seq_id]
    second.num_computed_tokens = 0  # its prompt is not computed yet
    assert not drafter.propose(sequences, {first.seq_id}, CONFIG)


def test_drafts_of_aborted_requests_are_dropped() -> None:
    drafter, sequences = Drafter([Always([7])], FREE, 4), live(3)
    drafter.propose(sequences, (), CONFIG)
    first, second, _ = sequences.running
    sequences.remove(first)
    drafter.propose(sequences, {second.seq_id}, CONFIG)  # its tokens are still in flight
    assert first.seq_id not in drafter._asked
    assert second.seq_id in drafter._asked


def test_drafts_are_skipped_without_room() -> None:
    drafter, sequences = Drafter([Always([7] * 4)], FREE, 4), live(4)
    config = replace(CONFIG, max_batch_size=4)
    drafts = drafter.propose(sequences, (), config)
    assert sum(map(len, drafts.values())) == config.max_draws - 4 == 1
    assert not drafter.propose(sequences, (), replace(CONFIG, max_tokens_per_batch=4))


def test_costs_extrapolate_beyond_measurements() -> None:
    costs = StepCosts((1, 2, 4, 8), (1.0, 1.5, 2.0, 3.0))
    assert costs.of(np.array([1, 3, 8, 16])).tolist() == [1.0, 1.75, 3.0, 5.0]
    assert StepCosts((1, 4), (3.0, 2.0)).seconds == (3.0, 3.0)  # costs never fall


class Hangs:
    name = "hangs"

    def __init__(self) -> None:
        self.go = threading.Event()

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        self.go.wait(30)
        return [Guess((), ())] * len(seqs)


class Answers:
    name = "answers"

    def __init__(self, answer: Callable[[Listed[Sequence], int], Any]) -> None:
        self.propose = answer


def fail(*_: object) -> Any:
    raise ZeroDivisionError("no guess")


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (fail, "no guess"),
    "beyond the vocabulary": (
        lambda seqs, most: [Guess([300], [0])],
        "token 300 is outside the vocabulary of 300",
    ),
    "negative": (lambda seqs, most: [Guess([-1], [0])], "token -1 is outside the vocabulary"),
    "no ids": (lambda seqs, most: [Guess(["x"], [0])], "invalid guesses"),
    "no guesses": (lambda seqs, most: None, "invalid guesses"),
    "too few": (lambda seqs, most: [], "0 guesses for 1"),
    "without kinds": (lambda seqs, most: [Guess([5], [])], "0 kinds for 1"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("drafts"))


def engine_of(model: Path, **options: Any) -> InferenceEngine:
    return InferenceEngine(EngineConfig(str(model), kv_cache_memory=2**20, **options))


@pytest.mark.parametrize("kind", BAD)
def test_bad_source_is_switched_off_and_harms_nothing(
    model: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    propose, problem = BAD[kind]
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    with engine_of(model) as plain, engine_of(model, speculation="ngram") as engine:
        assert engine.drafter is not None
        engine.drafter.costs = None  # otherwise drafts might not pay
        engine.drafter.sources.append(Watched(Answers(propose), engine.spec.vocab_size))
        with caplog.at_level(logging.ERROR):
            (sample,) = engine.generate([[5, 6, 7]], params)
        assert sample.logprobs == plain.generate([[5, 6, 7]], params)[0].logprobs
        stats = engine.stats().speculation
    assert stats is not None
    assert stats.sources == ("grammar", "ngram")
    assert [record for record in caplog.messages if problem in record]
    assert len([record for record in caplog.messages if "disabled draft source" in record]) == 1


@pytest.mark.thorough
def test_source_that_hangs_is_switched_off(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hangs()
    with engine_of(model, speculation="ngram") as engine:
        assert engine.drafter is not None
        engine.drafter.sources.append(Watched(hanging, 300, time_limit=0.05))
        (sample,) = engine.generate([[5, 6]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(sample.completion_tokens) == 5
        assert len(engine.drafter.sources) == 2
    hanging.go.set()
    assert "no answer within 0.05 s" in caplog.text


@pytest.mark.thorough
def test_oversized_drafts_are_truncated(model: Path) -> None:
    with engine_of(model, speculation="ngram", max_drafts=3) as engine:
        assert engine.drafter is not None
        million = Answers(lambda seqs, most: [Guess([5] * 10**6, [0] * 10**6) for _ in seqs])
        engine.drafter.sources[:] = [Watched(million, 300)]
        engine.drafter.costs = None
        engine.generate([[5, 6]], SamplingParams(max_tokens=5, ignore_eos=True))
        stats = engine.stats().speculation
        assert stats is not None
        assert 0 < len(stats.drafted["answers"]) <= 3


@pytest.mark.thorough
def test_engine_measures_step_costs(model: Path) -> None:
    with engine_of(model, speculation="auto") as engine:
        stats = engine.stats()
        assert stats.speculation is not None
        rows, seconds = stats.speculation.step_rows, stats.speculation.step_seconds
        assert rows[:4] == (1, 2, 4, 8) or rows[:3] == (1, 2, 3)
        assert all(each > 0 for each in seconds)
        assert (stats.num_steps, stats.completion_tokens) == (0, 0)
        engine.loop.check()
        assert stats.num_free_blocks == stats.num_blocks


def test_stats_start_at_zero_after_cost_measurement(model: Path) -> None:
    with engine_of(model) as plain, engine_of(model, speculation="auto") as engine:
        assert engine.drafter is not None
        assert engine.drafter.costs is not None
        assert engine.drafter.costs is not GUESSED, "steps were computed"
        apart = {"speculation": None, "ranks_busy": (), "ranks_waiting": ()}
        assert replace(engine.stats(), **apart) == replace(plain.stats(), **apart)
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert engine.stats().prompt_tokens_computed == 3


def test_stats_can_be_read_while_a_step_adds_a_source() -> None:
    """The stepping thread runs between two sources."""
    drafter = Drafter([])
    drafter._tell("one", 1, 1)
    drafter._tell("two", 1, 1)
    names = iter("abcdefgh")

    class Reading(list[int]):
        """Counts of a source that are slow to copy."""

        def __iter__(self) -> Iterator[int]:
            drafter._tell(next(names), 2, 1)
            return super().__iter__()

    for counts in (drafter._drafted, drafter._accepted):
        for name in counts:
            counts[name] = Reading(counts[name])
    stats = drafter.stats()
    assert stats.drafted["one"] == stats.drafted["two"] == (1,)
    assert stats.accepted.keys() == stats.drafted.keys()


@pytest.mark.parametrize("has_reference", [False, True])
def test_history_drafts_the_next_run(model: Path, has_reference: bool) -> None:
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    reference = str(model) if has_reference else None
    with engine_of(model, speculation="history", ref_model_path=reference) as engine:
        assert engine.drafter is not None
        engine.drafter.costs = None
        (first,) = engine.generate([[9, 8, 7]], params)
        steps = engine.stats().num_steps
        (again,) = engine.generate([[9, 8, 7]], params)
        assert again.logprobs == first.logprobs
        assert engine.stats().num_steps - steps < 25

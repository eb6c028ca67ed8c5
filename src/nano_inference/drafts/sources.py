"""The drafter of an engine: its sources, and what steps cost, measured once at start."""

from collections.abc import Callable, Container
from collections.abc import Sequence as Listed
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

from nano_inference.config import SELF, EngineConfig, SchedulerConfig, Speculation
from nano_inference.core.loop import Abort, EngineLoop, LoopHooks, OnFinish, Watch
from nano_inference.core.sequence import DRAFT, POLICY, CheckedRequest, Sequence, Sequences
from nano_inference.device.runner import ModelRunner
from nano_inference.drafts.costs import ROWS, StepCosts
from nano_inference.drafts.drafter import Drafter, may_draft
from nano_inference.drafts.eagle import EagleDrafts
from nano_inference.drafts.heads import HeadWeights, MedusaSpec
from nano_inference.drafts.history import HistoryDrafts
from nano_inference.drafts.medusa import MedusaDrafts
from nano_inference.drafts.model import ModelDrafts
from nano_inference.drafts.source import NO_GUESS, DraftSource, Guess
from nano_inference.drafts.suffix import SuffixDrafts
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import form_of, numbers_of
from nano_inference.sampling.drafted import Drafts
from nano_inference.types import SamplingParams, TrainingSample

MOST_SECONDS = 2.0  # that measuring may take, once some sizes are known
LEAST_SIZES = 4
TRIES = 3
PROMPT = 8  # tokens of the sequences that are measured
# Where nothing could be measured.
GUESSED = StepCosts((1, 2, 4, 8, 16, 32), (1.0, 1.1, 1.25, 1.6, 2.4, 4.4))


class ForcedDrafts:
    """See `DraftSource`. The text is certain; another split of it may be drawn."""

    name = "grammar"

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        """See `DraftSource`."""
        return [self._guess(seq, most) for seq in seqs]

    def _guess(self, seq: Sequence, most: int) -> Guess:
        forced = () if seq.grammar is None else seq.grammar.forced()[:most]
        return Guess(forced, (0,) * len(forced)) if forced else NO_GUESS


# `speculation` -> the sources that read text, by what makes them.
TEXT_SOURCES: dict[Speculation, tuple[Callable[[], DraftSource], ...]] = {
    "none": (),
    "auto": (partial(SuffixDrafts, True),),
    "ngram": (partial(SuffixDrafts, False),),
    "suffix": (partial(SuffixDrafts, True),),
    "history": (partial(SuffixDrafts, True), HistoryDrafts),
}


class MadeDrafter(NamedTuple):
    """A drafter, and what a loop has to call for it (`LoopHooks`)."""

    drafter: Drafter | None = None
    watches: tuple[Watch, ...] = ()
    on_finish: tuple[OnFinish, ...] = ()


def make_drafter(
    config: EngineConfig,
    sequences: Sequences,
    cache: KVCacheManager,
    runner: ModelRunner,
    heads: HeadWeights | None,
    measure: Callable[[], StepCosts],
) -> MadeDrafter:
    """Make the drafter that a config asks for. Heads that draft see every step of the loop.

    Args:
        config: of the engine.
        sequences: of its loop.
        cache: the policy's KV cache.
        runner: has the models.
        heads: that draft; None: there are none.
        measure: finds what steps cost; called only if there is a drafter.
    """
    if not config.drafts:
        return MadeDrafter()
    watches: tuple[Watch, ...] = ()
    sources = [ForcedDrafts(), *(make() for make in TEXT_SOURCES[config.speculation])]
    on_finish = tuple(partial(_keep, each) for each in sources if isinstance(each, HistoryDrafts))
    model = None
    if heads is not None:
        model = _head_drafts(heads, cache, runner)
        watches = (model.see,)
    elif config.draft_model is not None:
        model = _model_drafts(config, sequences, cache, runner)
    return MadeDrafter(Drafter(sources, measure(), config.max_drafts, model), watches, on_finish)


def _model_drafts(
    config: EngineConfig, sequences: Sequences, cache: KVCacheManager, runner: ModelRunner
) -> ModelDrafts:
    model, storage = runner.models[DRAFT], runner.storages[DRAFT]
    follow = None
    if config.draft_quantization is not None:
        versions = sequences.versions
        follow = CodedCopies(runner.models[POLICY], model, lambda: versions[POLICY]).follow
    return ModelDrafts(
        "self" if config.draft_model == SELF else "model",
        model,
        storage,
        range(cache.num_blocks, storage.num_blocks),
        has_own_cache=storage is not runner.storage,
        follow=follow,
    )


class CodedCopies:
    """Keeps weights of a draft model that are codes of the policy's those of its newest ones.

    Args:
        policy: the model that is copied.
        draft: its twin, of which some matrices may be codes of its own.
        version: tells the version of the policy's weights.
    """

    def __init__(self, policy: Decoder, draft: Decoder, version: Callable[[], int]) -> None:
        self._version, self._copied = version, version()  # `coded_copies` made them
        self._copies = [
            (policy.params[name], copy)
            for name, copy in draft.params.items()
            if copy is not policy.params.get(name) and form_of(copy) is not None
        ]

    def follow(self) -> None:
        """Quantise the policy's weights again if they have changed."""
        version = self._version()
        if version == self._copied:
            return
        for own, copy in self._copies:
            copy.write(0, numbers_of(own))
        self._copied = version


def _head_drafts(
    heads: HeadWeights, cache: KVCacheManager, runner: ModelRunner
) -> MedusaDrafts | EagleDrafts:
    policy = runner.models[POLICY]
    if isinstance(heads.spec, MedusaSpec):
        return MedusaDrafts(policy, heads)
    storage = runner.storages[DRAFT]
    return EagleDrafts(policy, heads, storage, range(cache.num_blocks, storage.num_blocks))


def _keep(
    history: HistoryDrafts, seq: Sequence, samples: list[TrainingSample]
) -> list[TrainingSample]:
    if seq.num_samples == 1:
        history.keep(seq, samples[0].weight_version)
    return samples


class _AnyDrafts:
    """So many that a step has the rows that are wanted."""

    def __init__(self, num_drafts: int) -> None:
        self._drafts = (0,) * num_drafts

    def propose(self, live: Sequences, pending: Container[int], config: SchedulerConfig) -> Drafts:
        """See `Drafter`."""
        return {seq.seq_id: self._drafts for seq in live.running if may_draft(seq)}

    def learn(self, seqs: Listed[Sequence], drafts: Drafts) -> int:
        """See `Drafter`."""
        return 0


def measure_costs(
    sequences: Sequences,
    cache: KVCacheManager,
    runner: ModelRunner,
    config: SchedulerConfig,
    max_model_len: int,
) -> StepCosts:
    """Run steps of one sequence with drafts that are thrown away, and time them.

    Nothing may run yet. Steps are those of the engine, on its own cache; its counters of tokens and
    steps are 0 afterwards.
    """
    found: dict[int, float] = {}
    time = partial(_seconds, sequences, cache, runner, config)
    time(1)  # what the first steps do once is no cost of a row
    begun = perf_counter()
    for rows in sorted(ROWS, key=lambda rows: (rows & (rows - 1) != 0, rows)):
        if len(found) >= LEAST_SIZES and perf_counter() - begun > MOST_SECONDS:
            break
        room = min(max_model_len, cache.num_blocks * cache.block_size)
        if PROMPT + TRIES + rows < room and rows <= config.max_tokens_per_batch:
            found[rows] = time(rows)
    runner.restart_counters()
    sizes = sorted(found)
    return StepCosts(sizes, [found[rows] for rows in sizes]) if sizes else GUESSED


def _seconds(
    sequences: Sequences,
    cache: KVCacheManager,
    runner: ModelRunner,
    config: SchedulerConfig,
    rows: int,
) -> float:
    config = replace(config, enable_prefix_caching=False, max_drafts=rows)
    hooks = LoopHooks(drafter=_AnyDrafts(rows - 1))
    probe = EngineLoop(cache, runner, config, 0, "", hooks, sequences)  # whose ids are used once
    params = SamplingParams(max_tokens=TRIES + rows)
    request = CheckedRequest(
        request_id=-1, num_prompt_tokens=PROMPT, params=params, stop_ids=frozenset(), seed=0
    )
    sequences.insert(Sequence(sequences.new_id(), request, [0] * PROMPT))
    probe.step()  # the prompt
    times: list[float] = []
    for _ in range(TRIES):
        started = perf_counter()
        probe.step()
        times.append(perf_counter() - started)
        if times[0] > MOST_SECONDS / 8:
            break
    probe.inbox.append(Abort(None))
    probe.handle()
    return min(times)

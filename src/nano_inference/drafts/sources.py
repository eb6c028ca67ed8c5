"""The drafter of an engine: its sources, and the costs of steps, measured once at start."""

from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Listed
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from nano_inference.config import MTP, SELF, EngineConfig, SchedulerConfig, Speculation
from nano_inference.core.loop import Abort, EngineLoop, LoopHooks, OnFinish, Watch
from nano_inference.core.sequence import DRAFT, POLICY, CheckedRequest, Sequence, Sequences
from nano_inference.device.runner import ModelRunner
from nano_inference.drafts.coded_copies import CodedCopies
from nano_inference.drafts.costs import ROWS, StepCosts
from nano_inference.drafts.drafter import Drafter, may_draft
from nano_inference.drafts.eagle import EagleDrafts
from nano_inference.drafts.heads import HeadWeights, MedusaSpec
from nano_inference.drafts.history import HistoryDrafts
from nano_inference.drafts.medusa import MedusaDrafts
from nano_inference.drafts.model import ModelDrafts
from nano_inference.drafts.mtp import MtpDrafts, MtpWeights
from nano_inference.drafts.source import NO_GUESS, DraftSource, Guess
from nano_inference.drafts.suffix import SuffixDrafts
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.mtp import drafting_table
from nano_inference.models.parameters.storage import coded_copies
from nano_inference.sampling.drafted import Drafts
from nano_inference.types import SamplingParams, TrainingSample

MOST_SECONDS = 2.0  # time limit of the measurement after LEAST_SIZES sizes
LEAST_SIZES = 4
TRIES = 3
PROMPT = 8  # prompt tokens of the measured sequences
# Relative costs, used if nothing could be measured.
GUESSED = StepCosts((1, 2, 4, 8, 16, 32), (1.0, 1.1, 1.25, 1.6, 2.4, 4.4))


class ForcedDrafts:
    """A `DraftSource` of the tokens that rules or a grammar force.

    A grammar's text is certain, but the model may split it into other tokens.
    """

    name = "grammar"

    def propose(self, seqs: Listed[Sequence], most: int) -> list[Guess]:
        return [self._guess(seq, most) for seq in seqs]

    def _guess(self, seq: Sequence, most: int) -> Guess:
        forced: Listed[int] = () if seq.rules is None else seq.rules.forced(seq.token_ids)
        if not forced and seq.grammar is not None:
            forced = seq.grammar.forced()
        forced = forced[:most]
        return Guess(forced, (0,) * len(forced)) if forced else NO_GUESS


# `speculation` -> constructors of the sources that read text.
TEXT_SOURCES: dict[Speculation, tuple[Callable[[], DraftSource], ...]] = {
    "none": (),
    "auto": (partial(SuffixDrafts, True),),
    "ngram": (partial(SuffixDrafts, False),),
    "suffix": (partial(SuffixDrafts, True),),
    "history": (partial(SuffixDrafts, True), HistoryDrafts),
}


class MadeDrafter(NamedTuple):
    """A drafter, the weights of its heads, and the hooks that it needs (`LoopHooks`)."""

    drafter: Drafter | None = None
    weights: HeadWeights | MtpWeights | None = None
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
    """Create the drafter for a config. Draft heads watch every step of the loop.

    Args:
        config: Config of the engine.
        sequences: Sequences of its loop.
        cache: The policy's KV cache.
        runner: Runner, which has the models.
        heads: Draft heads, or None.
        measure: Function that measures the costs of steps. Called only if there is a drafter.
    """
    if not config.drafts:
        return MadeDrafter()
    watches: tuple[Watch, ...] = ()
    sources = [ForcedDrafts(), *(make() for make in TEXT_SOURCES[config.speculation])]
    on_finish = tuple(partial(_keep, each) for each in sources if isinstance(each, HistoryDrafts))
    model, weights = None, heads
    if config.draft_model == MTP:
        model, weights = _mtp_drafts(config, sequences, cache, runner)
        watches = (model.see,)
    elif heads is not None:
        model = _head_drafts(heads, cache, runner)
        watches = (model.see,)
    elif config.draft_model is not None:
        model = _model_drafts(config, sequences, cache, runner)
    return MadeDrafter(
        Drafter(sources, measure(), config.max_drafts, model), weights, watches, on_finish
    )


def _model_drafts(
    config: EngineConfig, sequences: Sequences, cache: KVCacheManager, runner: ModelRunner
) -> ModelDrafts:
    model, storage = runner.models[DRAFT], runner.storages[DRAFT]
    follow = None
    if config.draft_quantization is not None:
        follow = _copies(runner.models[POLICY], model.params, sequences).follow
    return ModelDrafts(
        "self" if config.draft_model == SELF else "model",
        model,
        storage,
        range(cache.num_blocks, storage.num_blocks),
        has_own_cache=storage is not runner.storage,
        follow=follow,
    )


def _mtp_drafts(
    config: EngineConfig, sequences: Sequences, cache: KVCacheManager, runner: ModelRunner
) -> tuple[MtpDrafts, MtpWeights]:
    policy, storage, copies = runner.models[POLICY], runner.storages[DRAFT], None
    if config.draft_quantization is not None:
        table, matrix = drafting_table(policy.spec), policy.ops.allocate
        params = coded_copies(table, policy.params, matrix, config.draft_quantization)
        copies = _copies(policy, params, sequences)
    scratch = range(cache.num_blocks, storage.num_blocks)
    return MtpDrafts(policy, storage, scratch, copies), MtpWeights(policy, copies)


def _copies(policy: Decoder, params: Mapping[str, Any], sequences: Sequences) -> CodedCopies:
    return CodedCopies(policy, params, lambda: sequences.versions[POLICY])


def _head_drafts(
    heads: HeadWeights, cache: KVCacheManager, runner: ModelRunner
) -> MedusaDrafts | EagleDrafts:
    """Return the source that runs these heads."""
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
    """Proposes a fixed number of arbitrary drafts, to measure steps of any size."""

    def __init__(self, num_drafts: int) -> None:
        self._drafts = (0,) * num_drafts

    def propose(self, live: Sequences, pending: Container[int], config: SchedulerConfig) -> Drafts:
        return {seq.seq_id: self._drafts for seq in live.running if may_draft(seq)}

    def learn(self, seqs: Listed[Sequence], drafts: Drafts) -> int:
        return 0


def measure_costs(
    sequences: Sequences,
    cache: KVCacheManager,
    runner: ModelRunner,
    config: SchedulerConfig,
    max_model_len: int,
) -> StepCosts:
    """Time steps of one sequence with drafts that are discarded.

    Nothing else may be running. The steps are those of the engine, on its own cache. The runner's
    counters are reset afterwards.
    """
    seconds: dict[int, float] = {}
    time = partial(_seconds, sequences, cache, runner, config)
    time(1)  # warm up, so that one-time work is not measured
    begun = perf_counter()
    for rows in sorted(ROWS, key=lambda rows: (rows & (rows - 1) != 0, rows)):
        if len(seconds) >= LEAST_SIZES and perf_counter() - begun > MOST_SECONDS:
            break
        room = min(max_model_len, cache.num_blocks * cache.block_size)
        if PROMPT + TRIES + rows < room and rows <= config.max_tokens_per_batch:
            seconds[rows] = time(rows)
    runner.restart_counters()
    sizes = sorted(seconds)
    return StepCosts(sizes, [seconds[rows] for rows in sizes]) if sizes else GUESSED


def _seconds(
    sequences: Sequences,
    cache: KVCacheManager,
    runner: ModelRunner,
    config: SchedulerConfig,
    rows: int,
) -> float:
    config = replace(config, enable_prefix_caching=False, max_drafts=rows)
    hooks = LoopHooks(drafter=_AnyDrafts(rows - 1))
    probe = EngineLoop(cache, runner, config, 0, "", hooks, sequences)
    params = SamplingParams(max_tokens=TRIES + rows)
    request = CheckedRequest(
        request_id=-1, num_prompt_tokens=PROMPT, params=params, stop_ids=frozenset(), seed=0
    )
    sequences.insert(Sequence(sequences.new_id(), request, [0] * PROMPT))
    probe.step()  # compute the prompt
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

"""The drafter of an engine: its sources, and the costs of steps, measured once at start."""

from collections.abc import Callable, Container
from collections.abc import Sequence as Listed
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

from nano_inference.config import MTP, SELF, EngineConfig, SchedulerConfig, Speculation
from nano_inference.core.loop import Abort, EngineLoop, LoopHooks, OnFinish, Watch
from nano_inference.core.sequence import DRAFT, POLICY, CheckedRequest, Sequence, Sequences
from nano_inference.device.runner import ModelRunner
from nano_inference.drafts.costs import ROWS, StepCosts
from nano_inference.drafts.drafter import Drafter, may_draft
from nano_inference.drafts.eagle import EagleDrafts
from nano_inference.drafts.heads import HeadWeights, MedusaSpec
from nano_inference.drafts.history import HistoryDrafts
from nano_inference.drafts.layer_drafts import LayerDrafts
from nano_inference.drafts.medusa import MedusaDrafts
from nano_inference.drafts.model import ModelDrafts
from nano_inference.drafts.mtp import MtpDrafts
from nano_inference.drafts.source import NO_GUESS, DraftSource, Guess
from nano_inference.drafts.suffix import SuffixDrafts
from nano_inference.kv_cache.manager import KVCacheManager
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.storage import form_of, numbers_of
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
    """A drafter and the hooks that it needs (`LoopHooks`)."""

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
    model = None
    if heads is not None or config.draft_model == MTP:
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
    """Quantized copies of the policy's weights in a draft model, updated with the policy.

    Args:
        policy: Model to copy.
        draft: Draft model of the same shape. Some of its matrices may be quantized copies.
        version: Function that returns the version of the policy's weights.
    """

    def __init__(self, policy: Decoder, draft: Decoder, version: Callable[[], int]) -> None:
        self._version, self._copied = version, version()  # already copied by `coded_copies`
        self._copies = [
            (policy.params[name], copy)
            for name, copy in draft.params.items()
            if copy is not policy.params.get(name) and form_of(copy) is not None
        ]

    def follow(self) -> None:
        """Quantize the policy's weights again if they have changed."""
        version = self._version()
        if version == self._copied:
            return
        for weight, copy in self._copies:
            copy.write(0, numbers_of(weight))
        self._copied = version


def _head_drafts(
    heads: HeadWeights | None, cache: KVCacheManager, runner: ModelRunner
) -> MedusaDrafts | LayerDrafts:
    """Return the source that runs these heads. None: the policy's multi-token prediction layer."""
    policy = runner.models[POLICY]
    if heads is not None and isinstance(heads.spec, MedusaSpec):
        return MedusaDrafts(policy, heads)
    storage = runner.storages[DRAFT]
    scratch = range(cache.num_blocks, storage.num_blocks)
    if heads is None:
        return MtpDrafts(policy, storage, scratch)
    return EagleDrafts(policy, heads, storage, scratch)


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

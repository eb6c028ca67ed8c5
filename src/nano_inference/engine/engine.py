"""`InferenceEngine`: owns the loop and the parts it runs on; takes requests in and hands samples
out.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from nano_inference.checkpoints.loading import read_tensors
from nano_inference.checkpoints.lora import LoraSettings
from nano_inference.config import EngineConfig
from nano_inference.core.gate import Gate
from nano_inference.core.loop import Abort, Add, EngineLoop, GrammarReady, LoopHooks
from nano_inference.core.sequence import POLICY, REFERENCE, Sequence, Sequences
from nano_inference.device.backends import choose_device, lookahead_of
from nano_inference.device.routed_experts import route_taker
from nano_inference.drafts.costs import StepCosts
from nano_inference.drafts.sources import GUESSED, make_drafter, measure_costs
from nano_inference.engine import generation
from nano_inference.engine.adapters import AdapterInfo, Adapters, Merging
from nano_inference.engine.block_exchange import BlockExchange
from nano_inference.engine.build import Launcher, assemble_all
from nano_inference.engine.delivery import Sink
from nano_inference.engine.embedding import embed
from nano_inference.engine.generation import Progress
from nano_inference.engine.intake import Intake
from nano_inference.engine.requests import Params, RequestChecks
from nano_inference.engine.resume_from import resumed, resumed_here
from nano_inference.engine.shared_loop import SharedLoop, why_dead
from nano_inference.engine.weight_updates import Updates, manager_of
from nano_inference.errors import AdapterError, InvalidRequest
from nano_inference.ranks.lockstep import Lockstep, LockstepGate
from nano_inference.ranks.parts import require_one_rank
from nano_inference.structured.matching import GrammarState
from nano_inference.system.locks import FairLock
from nano_inference.system.moved import Removed
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import (
    Delta,
    EngineStats,
    KvPolicy,
    Limits,
    Memory,
    PauseMode,
    SamplingParams,
    TrainingSample,
    UpdateOptions,
)
from nano_inference.weights.transports import WeightTransport, receive_update
from nano_inference.weights.update import WeightUpdate

logger = logging.getLogger("nano_inference")


class InferenceEngine:
    """Token ids in; tokens, logprobs and weight versions out. A context manager.

    One thread steps at a time; any may generate, add, abort or update. A request's failure is its
    own: what cannot be served is refused with a typed error before anything changes.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher | None = None,
        *,
        lockstep: Lockstep | None = None,
    ) -> None:
        """Build an engine.

        Args:
            config: of the engine.
            launcher: who starts the other ranks, where there are several (docs/parallelism.md);
                None: this process.
            lockstep: with the engines that have the experts in common; None: it has them to itself.

        Raises `ConfigError` or `ModelLoadError`, with every rank ended and the lockstep left.
        """
        with ExitStack() as undo:  # of what a constructor that fails would leave behind
            gate, work_arrived = Gate(), threading.Event()
            if lockstep is not None:
                undo.callback(lockstep.close)
                device = choose_device(config.device)
                gate = LockstepGate(
                    lockstep, lambda: self.shared.member(), work_arrived.set, device
                )
            parts = assemble_all(config, launcher, gate)
            undo.callback(parts.runner.close)
            self.kept_files = parts.kept_files
            if self.kept_files is not None:
                undo.callback(self.kept_files.close)
            self._is_settled, self._told_of_rounding = config.quantization != "auto", False
            self.config = config = parts.config
            self.runner, self.model = parts.runner, parts.runner.models[POLICY]
            self.spec = self.model.part.whole
            self.numerics, self.memory_budget = parts.numerics, parts.memory_budget
            self.model_folder, self.cache = parts.folder, parts.cache
            self.max_model_len = self.memory_budget.max_model_len
            sequences, lock = Sequences(), FairLock()
            if REFERENCE in self.runner.models:
                sequences.versions[REFERENCE] = 0
            checks = RequestChecks(config, self.spec, parts.folder, self.max_model_len)
            take_routes, numerics = route_taker(self.model), self.numerics.fingerprint
            self.intake = Intake(checks, sequences, numerics, config.seed, take_routes)
            undo.callback(self.intake.grammars.close)
            self._draft_heads = parts.heads
            made = make_drafter(
                *(config, sequences, self.cache, self.runner, parts.heads),
                lambda: self._step_costs(sequences, lockstep is not None),
            )
            self.drafter = made.drafter
            self.weight_sync = manager_of(
                *(self.model, self.runner, gate, lock, self.memory_budget.workspace),
                shared=lambda: self.shared,
            )
            hooks = LoopHooks(
                gate=gate,
                weights=self.weight_sync,
                start_grammar=self._start_grammar,
                drafter=made.drafter,
                kept_files=self.kept_files,
                watches=made.watches,
                on_finish=made.on_finish,
            )
            lookahead = lookahead_of(config, self.model.device)
            self.loop = EngineLoop(
                *(self.cache, self.runner, config.scheduler, lookahead, numerics),
                *(hooks, sequences),
            )
            explain = partial(why_dead, config=config, loop=self.loop)
            self.shared = SharedLoop(self.loop, explain, self._when_dead, lock, work_arrived)
            self.blocks = BlockExchange(
                self.shared, self.cache, self.runner, enabled=config.enable_prefix_caching
            )
            self._updates = Updates(self.weight_sync, self.shared)
            self.adapter_table = self._make_adapters()
            self._merging = Merging(self.model, self._updates, self.shared)
            self.runner.watch(self.shared.lose)
            undo.pop_all()

    @property
    def in_blocks_by_default(self) -> bool:
        """Whether `quantization="auto"` put the weights into the blocks of their `.gguf` file."""
        return not self._is_settled and self.config.codes is not None

    def _tell_of_rounding(self) -> None:
        """Warn once that new weights are rounded, if codes are only the default."""
        if self.in_blocks_by_default and not self._told_of_rounding:
            self._told_of_rounding = True
            logger.warning(
                "New weights are rounded to the blocks of the .gguf file, which are the default on "
                "a CPU; quantization=None serves them as they are sent."
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (or the one at `tokenizer_path`), read when it is first asked
        for.
        """
        return self.intake.checks.tokenizer

    # -- generating --------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples_per_prompt: int = 1,
        *,
        stream: Literal[False] = False,
        progress: Progress = None,
        num_wanted: int | None = None,
    ) -> list[TrainingSample]: ...
    @overload
    def generate(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples_per_prompt: int = 1,
        *,
        stream: Literal[True],
        progress: Progress = None,
        num_wanted: int | None = None,
    ) -> Iterator[Delta]: ...
    def generate(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples_per_prompt: int = 1,
        *,
        stream: bool = False,
        progress: Progress = None,
        num_wanted: int | None = None,
    ) -> list[TrainingSample] | Iterator[Delta]:
        """Complete prompts; returns the samples prompt by prompt, whatever order they finish in.

        Args:
            prompts: one prompt or a list of them. A prompt is token ids, a string, or a chat (a
                list of messages `{"role": ..., "content": ...}`, put into the model's template).
                Samples of text have `text`.
            sampling_params: one for all, or one for each prompt.
            num_samples_per_prompt: samples of each prompt; the prompt is computed once for all of
                them.
            stream: return an iterator of `Delta` instead: pieces of all samples as they grow.
                Closing it aborts.
            progress: True shows a bar, False none, None one where generation is long and stderr is
                a terminal. Or a function that is called after every step with (finished samples,
                samples in all, completion tokens).
            num_wanted: of each prompt's samples; as in `add_request`.

        Samples of requests that others added are kept, and returned by the next `step()`. Raises
        `InvalidRequest` or `RequestTooLarge` before anything is added, and `EngineDead`.
        """
        self.shared.require_alive()
        requests = self.intake.sequences(
            prompts, sampling_params, num_samples_per_prompt, stream, num_wanted
        )
        deltas = generation.run(self.shared, requests, progress)
        return (
            deltas
            if stream
            else generation.in_order(deltas, [request.request_id for request in requests])
        )

    def generate_text(
        self,
        prompt: str | list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Any:
        """Text to text. A string gives a string, a list a list; streaming, pieces of text, or
        (place, piece) pairs.
        """
        params = sampling_params or SamplingParams()
        if not isinstance(prompt, str) and not all(isinstance(each, str) for each in prompt):
            raise InvalidRequest(
                "generate_text takes a string or a list of strings; generate takes all other "
                "prompts."
            )
        if stream:
            self.shared.require_alive()
            pieces = generation.texts(self.shared, self.intake.sequences(prompt, params, 1, True))
            return (text for _, text in pieces) if isinstance(prompt, str) else pieces
        texts = [sample.text for sample in self.generate(prompt, params)]
        return texts[0] if isinstance(prompt, str) else texts

    generate_async = Removed(
        "InferenceEngine.generate_async is removed; use "
        "AsyncInferenceEngine(engine).stream(prompt, params)."
    )

    def add_request(
        self,
        prompt: Any,
        params: SamplingParams,
        num_samples: int = 1,
        *,
        min_version: int | None = None,
        max_staleness: int | None = None,
        num_wanted: int | None = None,
        exact_version: int | None = None,
    ) -> int:
        """Queue a request; returns its id, which its samples carry. Raises `InvalidRequest` or
        `RequestTooLarge`.

        Args:
            prompt: as in `generate`, one.
            params: how its tokens are drawn.
            num_samples: how many samples of it.
            min_version: the request waits until weights of this version serve.
            max_staleness: it ends (`"abort"`, with what it has) when an update leaves the oldest
                version that it used this many versions behind, and one more.
            num_wanted: of its samples; when so many have finished, the others end with what they
                have (`"abort"`, stop_reason "group complete"). None: all.
            exact_version: its first token is sampled by this version: it waits for it, and is
                refused (`VersionGone`), or ends with nothing (`"abort"`, stop_reason "the weight
                version is gone"), when a newer one serves.
        """
        self.shared.require_alive()
        limits = Limits(
            num_wanted=num_wanted,
            min_version=min_version,
            max_staleness=max_staleness,
            exact_version=exact_version,
        )
        return self.shared.enqueue(
            self.intake.sequence(prompt, params, num_samples, stream=False, **limits)
        )

    def resume_from(
        self,
        sample: TrainingSample,
        *,
        append: Iterable[int] = (),
        max_new_tokens: int | None = None,
        version: int | None = None,
        sink: Sink | None = None,
    ) -> int:
        """Resume a sample where it stopped, token for token as if it had not; returns the id of the
        new request.

        Its sample has the whole completion, old tokens included, and the `group_id` of the resumed
        one. Keys and values that the cache
        still holds under the serving version are used again; the rest is computed again.

        Args:
            sample: a partial one (`"abort"`), one that ended by length, or, with `append`, any.
            append: tokens of a tool or an environment to put behind it first. Nothing sampled them:
                their logprob is 0 and their `loss_mask` False.
            max_new_tokens: sample so many more; None: up to the sample's own `max_tokens`, appended
                tokens included.
            version: go on with exactly these weights, until an update says otherwise; None: with
                those that serve.
            sink: takes the sample, as in `submit`; None: `step` returns it.

        Raises `InvalidRequest` (also for a version that is gone) or `RequestTooLarge`.
        """
        self.shared.require_alive()
        sequence = resumed(self.intake, sample, append, max_new_tokens)
        with self.shared.lock:
            self.shared.handle()
            if version is not None:
                sequence.weight_set = self._updates.weight_set_of(version)
            if sink is not None:
                self.shared.open([sequence], sink)
            # what is posted meanwhile may take the version away
            return self.shared.enqueue_first(sequence)

    def resume_many(
        self,
        samples: Listed[TrainingSample],
        sink: Sink,
        *,
        stream: bool,
        request_id: int,
        num_wanted: int | None = None,
        max_staleness: int | None = None,
        version: int | None = None,
    ) -> None:
        """Resume partial samples of one request, token for token as if they had been sampled here.

        Args:
            samples: the known part of each sample; some may have no token yet.
            sink: as in `submit`; it receives new tokens only.
            stream: as in `submit`.
            request_id: a new one, from `intake.new_request_id()`.
            num_wanted: how many of the samples are wanted, as in `add_request`.
            max_staleness: as in `add_request`.
            version: resume with these weights, where they still serve a sequence
                (`kv_policy="finish_old"`), after the step that runs; None: with those that serve.

        Raises `InvalidRequest` for a sample that cannot be resumed, before any state changes.
        """
        shared = self.shared
        shared.require_alive()
        sequences = resumed_here(
            self.intake,
            samples,
            stream=stream,
            request_id=request_id,
            num_wanted=num_wanted,
            max_staleness=max_staleness,
        )
        if version is None:
            shared.delivery.open(request_id, len(sequences), sink)
            for sequence in sequences:
                shared.post(Add(sequence))
            return
        with shared.lock:
            shared.handle()
            weight_set = self._updates.weight_set_of(version)
            shared.delivery.open(request_id, len(sequences), sink)
            for sequence in reversed(sequences):
                sequence.weight_set = weight_set
                shared.enqueue_first(sequence)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        num_samples: int,
        sink: Sink,
        *,
        stream: bool,
        request_id: int | None = None,
        **limits: Unpack[Limits],
    ) -> int:
        """Queue a request whose deltas go to `sink`, called by the thread that steps; returns
        its id. Limits: `add_request`.

        Without `stream` there is one delta a sample, when it has ended. Where another thread steps,
        deltas may come before this returns: who must know the id by then gives it
        (`intake.new_request_id()`). A sink that raises is not called again, and its request is
        aborted. For engines around this one.
        """
        self.shared.require_alive()
        sequence = self.intake.sequence(
            prompt, params, num_samples, stream=stream, request_id=request_id, **limits
        )
        self.shared.open([sequence], sink)
        return self.shared.enqueue(sequence)

    def step(self) -> list[TrainingSample]:
        """Run one step; returns the samples that ended since the last call."""
        return self.shared.step()

    def has_pending(self) -> bool:
        """Whether a call of `step` has anything to do or to return. Requests that are held or
        paused are nothing.
        """
        return self.shared.has_pending()

    def abort(self, request_ids: int | Iterable[int] | None = None) -> list[TrainingSample]:
        """End requests (None: all) now; returns their partial samples. Those that have ended are
        passed over.

        A `generate` that waits for one of them returns its partial samples too. A sample that is
        finished and waits for its reference logprobs is returned as it is, without them.
        """
        return self.shared.abort(self.intake.request_ids(request_ids))

    def abort_soon(self, request_ids: int | Iterable[int]) -> None:
        """End requests at the next step boundary, without waiting for it."""
        self.shared.post(Abort(self.intake.request_ids(request_ids)))

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: Any,
        blocking: bool = False,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdate:
        """Replace (part of) the policy's weights, in place, between two steps.

        Args:
            weights: tensors by the checkpoint's names, or by transformers' for all experts of a
                layer; only what changed need be there. Or a folder or file of safetensors, or any
                iterable of such dicts and of patches (name, flat indices, values).
            blocking: wait until the weights serve. Otherwise they are applied at the next step
                boundary (at once where nothing is in flight).
            kv_policy: what becomes of running requests (`KvPolicy`); None: `"recompute"` if
                blocking, else `"keep"`.
            version: number of the new version, larger than every one before; None counts up.
            complete: refuse an update that does not name every tensor.
            check_finite: refuse one that holds nan or infinity.

        Raises `WeightUpdateError`, the old version serving untouched; also where a blocking one
        would wait for itself.
        """
        self._tell_of_rounding()
        return self._updates.update(weights, blocking, **options)

    def receive_weights(
        self,
        transport: WeightTransport,
        *,
        timeout: float = 300.0,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdate:
        """Begin to receive an update from a trainer, on a thread of its own, while requests go on;
        returns at once.

        It is applied between two steps when all of it has arrived and was checked. Whatever goes
        wrong, a dead peer or a deadline too, fails the returned update and leaves the old version
        serving.

        Args:
            transport: what brings it (`weights/transports`).
            timeout: seconds by which it must have arrived.
            options: `kv_policy`, `version`, `complete` and `check_finite` as in `update_weights`;
                `kv_policy` None: `"keep"`; `version` None: the trainer's, or counted up.

        Raises `WeightUpdateError` if a weight session is open.
        """
        self.shared.require_alive()
        self._tell_of_rounding()
        self._updates.policy(options, "keep")
        return receive_update(self.weight_sync, transport, timeout=timeout, **options)

    def update_draft(self, weights: Mapping[str, Tensor] | str | PathLike[str]) -> None:
        """Replace (part of) the weights of the heads that draft (`draft_model`), between two steps.

        No bit of a sample depends on them, so nothing else changes: no version, no cached prefix.

        Args:
            weights: tensors by their names in the heads' folder, or a folder or file of
                safetensors.

        Raises `ConfigError` for a tensor that is not theirs, with nothing written, and
        `InvalidRequest` where no heads draft.
        """
        self.shared.require_alive()
        heads = self._draft_heads
        if heads is None:
            raise InvalidRequest(
                f"draft_model={self.config.draft_model!r} names no heads whose weights could be "
                "updated."
            )
        given = dict(weights) if isinstance(weights, Mapping) else dict(read_tensors(Path(weights)))
        new = heads.checked(given.items())
        self.shared.between_steps(POLICY, lambda: heads.write(new))

    # -- embeddings --------------------------------------------------------------------------------

    def embed(self, prompts: Any, *, adapter: str | None = None) -> list[Tensor]:
        """The hidden state behind the last token of each prompt, after the last norm: what the
        logits of the next token are made from. Its bits depend on the weights and on the prompt.

        Args:
            prompts: one prompt or a list of them, as `generate` takes them, of up to
                `max_model_len` tokens.
            adapter: name of a loaded adapter.

        Returns float32 [hidden size] a prompt, on the CPU. Any thread may call this. Raises
        `InvalidRequest`, `RequestTooLarge`, `RequestAborted` and `EngineDead`.
        """
        self.shared.require_alive()
        require_one_rank(self.runner, "embed")
        return embed(self.shared, self.intake, prompts, adapter)

    # -- adapters ----------------------------------------------------------------------------------

    def load_adapter(
        self,
        name: str,
        source: Mapping[str, Tensor] | str | PathLike[str],
        settings: LoraSettings | None = None,
        *,
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """Serve an adapter of low rank, or a new version of it, to requests that name it
        (`SamplingParams.adapter`); other requests are not disturbed.

        Args:
            name: of the adapter. One that is loaded already gets a new version.
            source: a folder as PEFT saves it, or its tensors by PEFT's names.
            settings: alpha and how it scales; None: the folder's, or the defaults.
            version: number of the version, larger than every one of this name before; None counts
                up, from 1 on.
            kv_policy: what becomes of requests that run with an older version: `"finish_old"` (they
                keep it), `"recompute"`, `"keep"` (their keys and values) or `"abort"`.

        Raises `AdapterError`, with nothing changed.
        """
        return self.adapter_table.load(name, source, settings, version, kv_policy)

    def unload_adapter(self, name: str) -> None:
        """No new request may ask for an adapter; those that have it finish with it, and what they
        asked to keep is let go. Raises `AdapterError`, also while it is merged.
        """
        self.adapter_table.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may ask for, by name."""
        return self.adapter_table.infos()

    def merge_adapter(self, name: str) -> int:
        """Write an adapter into the weights, until `unmerge_adapter`: each becomes W + scale * B A,
        computed in float32 and rounded once. Returns the new version.

        Requests for no adapter, or for this one, are then computed by these weights. Refused are
        those for others, updates of the weights, and a new version or `unload_adapter` of this
        adapter; while it is being merged or unmerged, requests for any adapter too. The weights as
        they were are kept. Bits are those of a model that was loaded from merged weights, not those
        of the adapter beside its base.

        Raises `AdapterError`, with nothing changed: for weights that are kept as codes
        (`quantization`), an adapter of a tied head, while the weights are asleep, while a request
        is computed with an adapter, and while an update is on its way. Adapters are of one rank,
        and so is this.
        """
        self.shared.require_alive()
        if self.config.codes is not None:
            raise AdapterError(
                f"quantization={self.config.codes!r} keeps codes, which a merge would round "
                "again; serve the adapter unmerged."
            )
        return self._merging.merge(name)

    def unmerge_adapter(self) -> int:
        """Write the weights back as they were before `merge_adapter`, to the bit; returns the new
        version. Requests for the adapter are computed beside them from then on.

        Raises `AdapterError`, with nothing changed, where none is merged, while the weights are
        asleep, and while a request for the adapter runs or waits.
        """
        self.shared.require_alive()
        return self._merging.unmerge()

    def _make_adapters(self) -> Adapters:
        config = self.config
        most = max(config.max_loras, len(config.loras))
        made = Adapters(self.model, self.shared, most, config.max_lora_rank)
        for each in config.loras:
            name, _, folder = each.partition("=")
            made.load(name, folder)
        return made

    def _step_costs(self, sequences: Sequences, in_lockstep: bool) -> StepCosts:
        """Return what steps cost, measured where no other engine takes part in them."""
        if in_lockstep:
            return GUESSED
        config = self.config.scheduler
        return measure_costs(sequences, self.cache, self.runner, config, self.max_model_len)

    def weights_checksum(self) -> dict[str, str]:
        """SHA-256 of every tensor as it serves now, by checkpoint name: its bytes, row by row, as
        it is held.
        """
        return self._updates.checksum()

    def get_weight_version(self) -> int:
        """The version that serves now."""
        return self.weight_sync.version

    def flush_cache(self) -> None:
        """Forget every cached prefix. Never needed for correctness: a block's name holds its weight
        version.
        """
        self.shared.require_alive()
        with self.shared.lock:
            self.cache.flush()
            if self.kept_files is not None:
                self.kept_files.forget(lambda _: True)

    # -- control -----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> list[TrainingSample]:
        """Stop computing until `resume`. Requests and updates are still taken in.

        Args:
            mode: `"keep"`: requests stop where they are and go on later, token for token; `"wait"`:
                they finish first, newcomers are held; `"abort"`: they end now, and their partial
                samples are returned.

        Until `resume`, calls of other threads and tasks that wait for samples or for an update wait
        on. A call that would wait for its own caller raises `InvalidRequest` or
        `WeightUpdateError`, also in the middle of a `generate` whose consumer pauses. A pause that
        Ctrl-C interrupts pauses nothing.
        """
        return self.shared.pause(mode) or []

    def resume(self) -> None:
        """Go on after a pause. Without one nothing happens."""
        self.shared.resume()

    def is_paused(self) -> bool:
        """Whether nothing is computed until `resume` or `wake`."""
        return not self.loop.life.launching

    def sleep(self, weights: bool = False, *, memory: Iterable[Memory] | None = None) -> None:
        """Pause, and give the KV cache's memory back; with `weights` the weights' too, which wait
        in a file.

        Requests stay, and compute their context again after `wake`; nothing else changes for them.
        With `memory` these parts of it alone, `"weights"` or `"kv_cache"`; what sleeps already
        stays so.
        """
        if memory is None and self.shared.asleep():
            raise InvalidRequest("the engine is asleep already; wake() it first.")
        if memory is None:
            memory = ("kv_cache", "weights") if weights else ("kv_cache",)
        self.shared.sleep(set(memory), self.runner.give_back)

    def wake(self, *, memory: Iterable[Memory] | None = None) -> None:
        """Take the memory again and go on. Without a sleep nothing happens.

        With `memory` only these parts of it; the engine goes on when all is awake, and not before
        `resume` if it was paused as well. Weights that are awake can be updated while the KV cache
        sleeps.
        """
        self.shared.wake(None if memory is None else set(memory))

    def sleeping(self) -> tuple[Memory, ...]:
        """The parts of the memory that sleep."""
        return self.shared.asleep()

    # -- the rest ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the engine was built, and its state now."""
        loop, runner, cache, sequences = self.loop, self.runner, self.cache, self.loop.sequences
        files = self.kept_files
        seconds = loop.clock.seconds
        times = [(busy / 1e9, waiting / 1e9) for busy, waiting in runner.rank_times()]
        for_samples = loop.clock.nanoseconds["wait"] / 1e9  # that rank 0 waited
        return EngineStats(
            num_waiting=len(sequences.waiting),
            num_running=len(sequences.running),
            num_held=len(sequences.held),
            weight_version=self.get_weight_version(),
            num_free_blocks=cache.num_free_blocks(),
            num_blocks=cache.num_blocks,
            num_cached_blocks=cache.num_cached_blocks(),
            num_shared_blocks=cache.num_shared_blocks(),
            kv_leaked_blocks=loop.num_leaked_blocks,
            kv_use=cache.share_in_use(),
            num_steps=loop.num_steps,
            num_preemptions=loop.num_preemptions,
            tokens_computed=runner.tokens_computed,
            prompt_tokens_computed=runner.prompt_tokens_computed,
            prompt_tokens_cached=loop.num_cached_tokens,
            hit_rate=loop.num_cached_tokens
            / max(loop.num_cached_tokens + runner.prompt_tokens_computed, 1),
            prompt_tokens=loop.num_prompt_tokens,
            prompt_tokens_queried=loop.num_queried_tokens,
            completion_tokens=loop.num_completion_tokens,
            tokens_per_second=loop.num_completion_tokens / seconds if seconds else 0.0,
            step_microseconds=loop.clock.microseconds(loop.num_steps),
            speculation=self.drafter.stats() if self.drafter is not None else None,
            ranks_busy=tuple(busy for busy, _ in times),
            ranks_waiting=tuple(
                waiting + for_samples * (rank == 0) for rank, (_, waiting) in enumerate(times)
            ),
            grammars_compiled=self.intake.grammars.num_compiled,
            grammars_failed=self.intake.grammars.num_failed,
            grammar_seconds=self.intake.grammars.seconds,
            num_kept_blocks=cache.kept.count(),
            kept_file_bytes=files.num_bytes if files is not None else 0,
            kept_blocks_written=files.num_written if files is not None else 0,
            kept_blocks_read=files.num_read if files is not None else 0,
        )

    def shutdown(self) -> None:
        """Let go of weights and KV cache. Unfinished requests are lost; every later call raises
        `EngineDead`.
        """
        self.intake.grammars.close()
        with self.shared.lock:
            self.runner.close()
            self.shared.end("the engine was shut down")
            if self.kept_files is not None:
                self.kept_files.close()

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _when_dead(self, why: str) -> None:
        self.runner.end()
        self.weight_sync.close(why)

    def _start_grammar(self, seq: Sequence) -> None:
        assert isinstance(seq.grammar, GrammarState)
        self.intake.grammars.start(seq.grammar, lambda: self.shared.post(GrammarReady(seq)))

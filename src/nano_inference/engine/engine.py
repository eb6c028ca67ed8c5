"""`InferenceEngine`: owns the loop and its parts, accepts requests and returns samples."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from nano_inference.arrays import Tensor, as_torch
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.checkpoints.lora import LoraSettings
from nano_inference.config import EngineConfig
from nano_inference.core.gate import Gate
from nano_inference.core.logits_processors import LogitsProcessor
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
from nano_inference.engine.kept_prompts import KeptPrompts
from nano_inference.engine.receipts import ReceiptMaker
from nano_inference.engine.requests import Params, RequestChecks
from nano_inference.engine.resume_from import resumed, resumed_here
from nano_inference.engine.shared_loop import SharedLoop, why_dead
from nano_inference.engine.weight_updates import Updates, manager_of
from nano_inference.errors import AdapterError, InvalidRequest
from nano_inference.structured.matching import GrammarState
from nano_inference.system.locks import FairLock
from nano_inference.system.moved import Removed
from nano_inference.system.signing import read_key
from nano_inference.text.chat import Tools
from nano_inference.text.conversation import Conversation, OnRewrite
from nano_inference.text.messages import Messages
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import (
    Delta,
    EngineStats,
    KvPolicy,
    Limits,
    Memory,
    PauseMode,
    RequestStatus,
    SamplingParams,
    TrainingSample,
    UpdateOptions,
)
from nano_inference.weights.staging import taken
from nano_inference.weights.transports import WeightTransport, receive_update
from nano_inference.weights.update import WeightUpdate

if TYPE_CHECKING:  # needs torch
    from nano_inference.ranks.lockstep import Lockstep

logger = logging.getLogger("nano_inference")


class InferenceEngine:
    """Inference engine: token ids in, tokens with logprobs and weight versions out. Use it as a
    context manager.

    One thread steps at a time. Any thread may generate, add, abort or update. A request that cannot
    be served is rejected with a typed error before anything changes, and never affects other
    requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher | None = None,
        *,
        lockstep: "Lockstep | None" = None,
    ) -> None:
        """Build an engine. Raises `ConfigError` or `ModelLoadError`, after all ranks have ended and
        the lockstep is left.

        Args:
            config: Configuration of the engine.
            launcher: Launcher of the other ranks, if there are several (docs/parallelism.md). None
                starts them from this process.
            lockstep: Coordinator of engines that share experts. None if this engine holds all
                experts.
        """
        with ExitStack() as undo:  # releases resources if the constructor fails
            gate, work_arrived = Gate(), threading.Event()
            signing_key = None if config.receipt_key is None else read_key(config.receipt_key)
            if lockstep is not None:
                from nano_inference.ranks.lockstep import LockstepGate

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
            self._is_settled, self._warned_of_rounding = config.quantization != "auto", False
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
            made = make_drafter(
                *(config, sequences, self.cache, self.runner, parts.heads),
                lambda: self._step_costs(sequences, lockstep is not None),
            )
            self.drafter, self._draft_weights = made.drafter, made.weights
            self.weight_sync = manager_of(
                *(self.model, self.runner, gate, lock, self.memory_budget.workspace),
                shared=lambda: self.shared,
            )
            self.receipts = ReceiptMaker(sequences, self.weight_sync.content_hash, signing_key)
            hooks = LoopHooks(
                gate=gate,
                weights=self.weight_sync,
                start_grammar=self._start_grammar,
                processors=self.intake.processors,
                drafter=made.drafter,
                kept_files=self.kept_files,
                receipts=self.receipts,
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
            self.kept_prompts = KeptPrompts(self.shared, self.intake)
            self._updates = Updates(self.weight_sync, self.shared)
            self.adapter_table = self._make_adapters()
            self._merging = Merging(self.adapter_table, self.model, self._updates, self.shared)
            self.runner.watch(self.shared.lose)
            undo.pop_all()

    @property
    def in_blocks_by_default(self) -> bool:
        """True if `quantization="auto"` kept the weights in the blocks of their `.gguf` file."""
        return not self._is_settled and self.config.codes is not None

    def _warn_of_rounding(self) -> None:
        """Warn once that new weights are rounded, if `quantization="auto"` chose the codes."""
        if self.in_blocks_by_default and not self._warned_of_rounding:
            self._warned_of_rounding = True
            logger.warning(
                "New weights are rounded to the blocks of the .gguf file, which are the default on "
                "a CPU. Set quantization=None to serve them unrounded."
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """Model's tokenizer, or the one at `tokenizer_path`. It is loaded on first access."""
        return self.intake.checks.tokenizer

    # -- generating --------------------------------------------------------------------------------

    def conversation(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        on_rewrite: OnRewrite = "reject",
    ) -> Conversation:
        """Begin a chat that is kept as token ids. Pass it to `generate` as a prompt. Arguments and
        errors are those of `Conversation`.
        """
        tokenizer = self.intake.checks.need_tokenizer("a conversation")
        return Conversation(
            tokenizer, tuple(messages), tools, dict(template_kwargs or {}), on_rewrite
        )

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
        """Complete prompts. Return the samples prompt by prompt, regardless of the order in which
        they finish.

        Samples of requests added by other calls are kept for the next `step()`. Raises
        `InvalidRequest` or `RequestTooLarge` before anything is added, and `EngineDead`.

        Args:
            prompts: One prompt or a list of them. A prompt is token ids, a string, or a chat (a
                list of messages `{"role": ..., "content": ...}`, rendered by the model's template).
                Samples of text prompts have `text`.
            sampling_params: Sampling parameters for all prompts, or one per prompt.
            num_samples_per_prompt: Number of samples per prompt. The prompt is computed once for
                all.
            stream: Return an iterator of `Delta` instead, which yields parts of all samples as they
                grow. Closing it aborts unfinished requests.
            progress: True shows a progress bar, False none, None one for long generation if stderr
                is a terminal. A function is called after every step with (finished samples, total
                samples, completion tokens).
            num_wanted: Number of samples wanted per prompt, as in `add_request`.
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
        """Complete text. A string returns a string, a list returns a list. With `stream`, yield
        parts of the text for a string, and (index, part) pairs for a list.
        """
        params = sampling_params or SamplingParams()
        if not isinstance(prompt, str) and not all(isinstance(each, str) for each in prompt):
            raise InvalidRequest(
                "generate_text takes a string or a list of strings; use generate for other prompts."
            )
        if stream:
            self.shared.require_alive()
            pieces = generation.texts(self.shared, self.intake.sequences(prompt, params, 1, True))
            return (text for _, text in pieces) if isinstance(prompt, str) else pieces
        texts = [sample.text for sample in self.generate(prompt, params)]
        return texts[0] if isinstance(prompt, str) else texts

    generate_async = Removed(
        "InferenceEngine.generate_async was removed; use "
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
        turn_of: int | None = None,
    ) -> int:
        """Queue a request and return its id, which its samples carry. Raises `InvalidRequest` or
        `RequestTooLarge`.

        Args:
            prompt: One prompt, as in `generate`.
            params: Sampling parameters.
            num_samples: Number of samples.
            min_version: Hold the request until weights of at least this version are live.
            max_staleness: Number of versions by which the oldest version used by the request may be
                behind the live one. An update that exceeds it ends the request (`"abort"`, with the
                tokens sampled so far).
            num_wanted: Number of samples wanted. When that many have finished, the others end with
                the tokens sampled so far (`"abort"`, stop_reason "group complete"). None wants all.
            exact_version: Version that samples the first token. The request is held until that
                version is live. If a newer one is live, it is rejected (`VersionGone`), or ends
                without tokens (`"abort"`, stop_reason "the weight version is gone").
            turn_of: Id of an earlier request, live or ended, whose place in the queue it takes.
                Give a conversation's first request, so that its turns precede newer conversations.
        """
        self.shared.require_alive()
        limits = Limits(
            num_wanted=num_wanted,
            min_version=min_version,
            max_staleness=max_staleness,
            exact_version=exact_version,
            turn_of=turn_of,
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
        """Resume a sample as if it had never stopped, token for token. Return the id of the new
        request.

        The resulting sample has the whole completion, including the old tokens, and the same
        `group_id`. Keys and values still cached under the live version are reused. The rest is
        recomputed. Raises `InvalidRequest` (also for a version that was replaced) or
        `RequestTooLarge`.

        Args:
            sample: Partial sample (`"abort"`), sample that ended by length or, with `append`, any
                sample.
            append: Tokens of a tool or an environment to append first. Their logprob is 0 and their
                `loss_mask` False, since they are not sampled.
            max_new_tokens: Maximum number of new tokens to sample. None keeps the sample's own
                `max_tokens`, which also counts appended tokens.
            version: Weight version to resume with, until an update changes it. None uses the live
                weights.
            sink: Function that receives the sample, as in `submit`. None lets `step` return it.
        """
        self.shared.require_alive()
        sequence = resumed(self.intake, sample, append, max_new_tokens)
        with self.shared.lock:
            self.shared.handle()
            if version is not None:
                sequence.weight_set = self._updates.weight_set_of(version)
            if sink is not None:
                self.shared.open([sequence], sink)
            # messages that arrive meanwhile may replace the version
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
        Raises `InvalidRequest` for a sample that cannot be resumed, before any state changes.

        Args:
            samples: Known part of each sample. Some may have no token yet.
            sink: Function that receives new tokens only, as in `submit`.
            stream: Deltas per token or per sample, as in `submit`.
            request_id: New id, from `intake.new_request_id()`.
            num_wanted: Number of samples wanted, as in `add_request`.
            max_staleness: Limit, as in `add_request`.
            version: Weight version to resume with after the running step, if it still serves a
                sequence (`kv_policy="finish_old"`). None uses the live weights.
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
        """Queue a request whose deltas are passed to `sink` by the stepping thread. Return its id.
        For limits see `add_request`.

        Without `stream` there is one delta per sample, at its end. If another thread steps, deltas
        may arrive before this returns. To know the id in advance, pass a `request_id` from
        `intake.new_request_id()`. A sink that raises is not called again, and its request is
        aborted. Intended for wrappers of the engine.
        """
        self.shared.require_alive()
        sequence = self.intake.sequence(
            prompt, params, num_samples, stream=stream, request_id=request_id, **limits
        )
        self.shared.open([sequence], sink)
        return self.shared.enqueue(sequence)

    def step(self) -> list[TrainingSample]:
        """Run one step. Return the samples that ended since the last call."""
        return self.shared.step()

    def has_pending(self) -> bool:
        """Return True if `step` has anything to do or to return. Held and paused requests do not
        count.
        """
        return self.shared.has_pending()

    def abort(self, request_ids: int | Iterable[int] | None = None) -> list[TrainingSample]:
        """End requests (None: all) now and return their partial samples. Requests that have ended
        are ignored.

        A `generate` call that waits for one of them returns its partial samples too. A finished
        sample that waits for its reference logprobs is returned without them.
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
        """Replace some or all of the policy's weights, in place, between two steps.

        Raises `WeightUpdateError`, with the old version still live and unchanged, also if a
        blocking update would wait for its own caller.

        Args:
            weights: Tensors by checkpoint name, or by transformers' name for all experts of a
                layer. Only changed tensors are needed. Alternatively a folder or file of
                safetensors, or an iterable of such dicts and of patches (name, flat indices,
                values).
            blocking: Wait until the weights are live. Otherwise they are applied at the next step
                boundary, or immediately if no step is in flight.
            kv_policy: Effect on running requests (`KvPolicy`). None is `"recompute"` if blocking,
                otherwise `"keep"`.
            version: Number of the new version, higher than all before. None counts up.
            complete: Reject an update that does not name every tensor.
            check_finite: Reject an update that holds nan or infinity.
        """
        self._warn_of_rounding()
        return self._updates.update(weights, blocking, **options)

    def receive_weights(
        self,
        transport: WeightTransport,
        *,
        timeout: float = 300.0,
        **options: Unpack[UpdateOptions],
    ) -> WeightUpdate:
        """Start to receive an update from a trainer, on a separate thread, while requests continue.
        Return immediately.

        The update is applied between two steps after all of it has arrived and was checked. Any
        failure, including a lost connection or a timeout, fails the returned update. The old
        version then stays live. Raises `WeightUpdateError` if a weight session is open.

        Args:
            transport: Transport that delivers the update (`weights/transports`).
            timeout: Seconds within which it must arrive.
            options: Options `kv_policy`, `version`, `complete` and `check_finite` of
                `update_weights`. `kv_policy` None is `"keep"`. `version` None is the trainer's
                number, or counts up.
        """
        self.shared.require_alive()
        self._warn_of_rounding()
        self._updates.policy(options, "keep")
        return receive_update(self.weight_sync, transport, timeout=timeout, **options)

    def update_draft(self, weights: Mapping[str, Tensor] | str | PathLike[str]) -> None:
        """Replace some or all weights of the draft heads (`draft_model`), or of the policy's layer
        of multi-token prediction, between two steps.

        No bit of a sample depends on them, so weight versions and cached prefixes stay unchanged.
        Raises `ConfigError` for a tensor that does not belong to them, with nothing written, and
        `InvalidRequest` without draft heads.

        Args:
            weights: Tensors by their names in the heads' folder or in the policy's checkpoint, or a
                folder or file of safetensors.
        """
        self.shared.require_alive()
        held = self._draft_weights
        if held is None:
            raise InvalidRequest(
                f"draft_model={self.config.draft_model!r} does not name draft heads; only their "
                "weights can be updated."
            )
        named = dict(weights) if isinstance(weights, Mapping) else dict(read_tensors(Path(weights)))
        device = self.model.device
        write = held.replacing((name, taken(each, device)) for name, each in named.items())
        self.shared.between_steps(POLICY, write)

    # -- embeddings --------------------------------------------------------------------------------

    def embed(self, prompts: Any, *, adapter: str | None = None) -> list[Tensor]:
        """Return the hidden state after the last token of each prompt, float32 [hidden size] on the
        CPU.

        It is the output of the final norm, from which the next token's logits are computed. Its
        bits depend only on the weights and the prompt. Any thread may call this. Raises
        `InvalidRequest`, `RequestTooLarge`, `RequestAborted` and `EngineDead`.

        Args:
            prompts: One prompt or a list of them, as in `generate`, of up to `max_model_len`
                tokens.
            adapter: Name of a loaded adapter.
        """
        states = embed(self.shared, self.intake, self.runner, prompts, adapter)
        return [as_torch(state) for state in states]

    # -- adapters ----------------------------------------------------------------------------------

    def register_logits_processor(self, name: str, processor: LogitsProcessor) -> None:
        """Let requests name a function that changes their logits
        (`SamplingParams.logits_processors`). Raises `InvalidRequest` if the name is taken.

        Samples have the name at the end of `numerics`, so give changed code another name.

        Args:
            name: Name, an identifier.
            processor: Pure function of the token ids so far, prompt included, and of a copy of the
                model's logits, float32 [vocab_size]. It returns the new logits. -inf masks a token.
                If it raises, only its own sample ends. It runs in the thread that steps.
        """
        self.intake.processors.register(name, processor)

    def load_adapter(
        self,
        name: str,
        source: Mapping[str, Tensor] | str | PathLike[str],
        settings: LoraSettings | None = None,
        *,
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """Load a LoRA adapter, or a new version of it, for requests that name it
        (`SamplingParams.adapter`). Other requests are not affected. Raises `AdapterError`, with
        nothing changed.

        Args:
            name: Name of the adapter. A loaded adapter gets a new version.
            source: Folder saved by PEFT, or tensors by PEFT's names.
            settings: Alpha and scaling. None uses the folder's settings, or the defaults.
            version: Number of the version, higher than all before for this name. None counts up
                from 1.
            kv_policy: Effect on requests that run with an older version: `"finish_old"` (finish
                with it), `"recompute"`, `"keep"` (keep their keys and values) or `"abort"`.
        """
        return self.adapter_table.load(name, source, settings, version, kv_policy)

    def unload_adapter(self, name: str) -> None:
        """Reject new requests for an adapter. Requests that use it finish with it, and their kept
        blocks are released. Raises `AdapterError`, also while the adapter is merged.
        """
        self.adapter_table.unload(name)

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters that requests can name, sorted by name."""
        return self.adapter_table.infos()

    def merge_adapter(self, name: str) -> int:
        """Merge an adapter into the weights until `unmerge_adapter`. Each weight becomes W + scale
        * B A, computed in float32 and rounded once. Return the new weight version.

        Requests without an adapter or for this one are then computed with the merged weights.
        Requests for other adapters, weight updates, and reloading or unloading this adapter are
        rejected. During merging and unmerging, requests for any adapter are rejected. The original
        weights are kept. The bits are those of a model loaded from merged weights, which differ
        from those of an unmerged adapter.

        Raises `AdapterError`, with nothing changed, for quantized weights (`quantization`) and for
        an adapter of a tied head. The same error is raised while the weights are asleep, while a
        request uses an adapter, and during an update.
        """
        self.shared.require_alive()
        if self.config.codes is not None:
            raise AdapterError(
                f"quantization={self.config.codes!r} stores codes, which a merge would round "
                "again; serve the adapter unmerged."
            )
        return self._merging.merge(name)

    def unmerge_adapter(self) -> int:
        """Restore the weights from before `merge_adapter`, bit for bit. Return the new weight
        version. Requests for the adapter are computed unmerged again.

        Raises `AdapterError`, with nothing changed, if no adapter is merged, while the weights are
        asleep, and while a request for the adapter is running or waiting.
        """
        self.shared.require_alive()
        return self._merging.unmerge()

    def _make_adapters(self) -> Adapters:
        config = self.config
        adapters = Adapters(
            *(self.model, self.shared, self.weight_sync.weights, self.runner.adapters),
            *(config.most_loras, config.max_lora_rank),
        )
        for entry in config.loras:
            name, _, folder = entry.partition("=")
            adapters.load(name, folder)
        return adapters

    def _step_costs(self, sequences: Sequences, in_lockstep: bool) -> StepCosts:
        """Return the costs of steps, measured unless other engines take part in them."""
        if in_lockstep:
            return GUESSED
        config = self.config.scheduler
        return measure_costs(sequences, self.cache, self.runner, config, self.max_model_len)

    def weights_checksum(self) -> dict[str, str]:
        """Return the SHA-256 of every live tensor by checkpoint name, over its bytes as stored, row
        by row.
        """
        return self._updates.checksum()

    def get_weight_version(self) -> int:
        """Return the live weight version."""
        return self.weight_sync.version

    def request_statuses(self) -> list[RequestStatus]:
        """Return the status of every open request, oldest first, and why each one waits."""
        self.shared.require_alive()
        with self.shared.lock:
            self.shared.handle()
            return self.loop.request_statuses()

    def flush_cache(self) -> None:
        """Drop all cached prefixes, including kept files. Never needed for correctness, since a
        block's name contains its weight version.
        """
        self.shared.require_alive()
        with self.shared.lock:
            self.cache.flush()
            if self.kept_files is not None:
                self.kept_files.forget(lambda _: True)

    # -- control -----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> list[TrainingSample]:
        """Stop computing until `resume`. Requests and updates are still accepted. Return the
        partial samples of `mode="abort"`.

        Until `resume`, calls of other threads and tasks that wait for samples or for an update keep
        waiting. A call that would wait for its own caller raises `InvalidRequest` or
        `WeightUpdateError`, also in the middle of a `generate` whose consumer pauses. A pause
        interrupted by Ctrl-C pauses nothing.

        Args:
            mode: Effect on running requests. `"keep"` suspends them, to continue later token for
                token. `"wait"` finishes them first and holds new requests. `"abort"` ends them now.
        """
        return self.shared.pause(mode) or []

    def resume(self) -> None:
        """Continue after a pause. It does nothing if the engine is not paused, and raises
        `InvalidRequest` if it is only asleep.
        """
        self.shared.resume()

    def is_paused(self) -> bool:
        """Return True if nothing is computed until `resume` or `wake`."""
        return not self.loop.life.launching

    def sleep(self, weights: bool = False, *, memory: Iterable[Memory] | None = None) -> None:
        """Pause and release the memory of the KV cache. With `weights`, also release the weights,
        which are saved to a file.

        Requests stay and recompute their context after `wake`. Nothing else changes for them.
        `memory` selects the parts to release instead, `"weights"` or `"kv_cache"`. Parts already
        asleep stay so.
        """
        if memory is None and self.shared.asleep():
            raise InvalidRequest("the engine is already asleep; call wake() first.")
        if memory is None:
            memory = ("kv_cache", "weights") if weights else ("kv_cache",)
        self.shared.sleep(set(memory), self.runner.give_back)

    def wake(self, *, memory: Iterable[Memory] | None = None) -> None:
        """Reallocate the memory, restore its contents and resume. It does nothing if the engine is
        not asleep.

        Without `memory`, all parts are woken and a pause ends too. `memory` selects the parts to
        wake. The engine then resumes once all parts are awake and `resume` has ended a pause, if
        there was one. Awake weights can be updated while the KV cache sleeps.
        """
        self.shared.wake(None if memory is None else set(memory))

    def sleeping(self) -> tuple[Memory, ...]:
        """Return the parts of the memory that are asleep."""
        return self.shared.asleep()

    # -- statistics and shutdown -------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return counters since the engine was built, and its current state."""
        loop, runner, cache, sequences = self.loop, self.runner, self.cache, self.loop.sequences
        files = self.kept_files
        seconds = loop.clock.seconds
        times = [(busy / 1e9, waiting / 1e9) for busy, waiting in runner.rank_times()]
        for_samples = loop.clock.nanoseconds["wait"] / 1e9  # wait of rank 0 for samples
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
        """Release weights and KV cache. Unfinished requests are lost. Later calls raise
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

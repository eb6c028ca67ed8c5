"""`InferenceEngine`: owns the model, the KV cache and the loop; checks what comes in and hands out samples."""

import itertools
import logging
import operator
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import psutil
import torch
from torch import Tensor

from nano_inference.config import CacheType, EngineConfig
from nano_inference.engine.loop import Abort, Add, ChangeWeights, EngineLoop
from nano_inference.engine.runner import ModelRunner
from nano_inference.engine.storage import KVStorage, plan_memory
from nano_inference.engine.weight_sync import WeightSyncManager, WeightUpdate
from nano_inference.errors import ConfigError, EngineDead, InvalidRequest, RequestTooLarge
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.kv_cache.paged import PagedKVCache
from nano_inference.kv_cache.radix import RadixKVCache
from nano_inference.models.decoder import Decoder
from nano_inference.models.loading import load_params, load_spec, num_bytes, resolve_dtype, resolve_model
from nano_inference.models.weights import param_table
from nano_inference.ops.backend import Numerics
from nano_inference.ops.reference import reference_ops
from nano_inference.scheduling.sequence import POLICY, Sequence
from nano_inference.text.tokenizer import Tokenizer, load_tokenizer
from nano_inference.types import EngineStats, SamplingParams, TrainingSample

logger = logging.getLogger("nano_inference")

CACHES: dict[CacheType, type[PagedKVCache | RadixKVCache]] = {"paged": PagedKVCache, "radix": RadixKVCache}

# progress(finished samples, samples in all, completion tokens so far), called after every step of `generate`
Progress = Callable[[int, int, int], None]


class InferenceEngine:
    """Token ids in; tokens, logprobs and weight versions out. A context manager.

    One thread steps; any thread may add, abort or update. A request's failure is its own: what cannot be served is
    refused with a typed error before anything changes.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        device = _device(config.device)
        torch.set_num_threads(config.num_threads or psutil.cpu_count(logical=False) or torch.get_num_threads())
        folder = resolve_model(config.model_path)
        self.spec = load_spec(folder)
        dtype = resolve_dtype(config.dtype, self.spec)
        params = load_params(folder, self.spec, dtype, device)
        weight_bytes = num_bytes(param_table(self.spec), dtype)
        self.model_folder = folder
        self.memory_budget = plan_memory(config, self.spec, weight_bytes, dtype, device)
        self.max_model_len = self.memory_budget.max_model_len
        if config.max_model_len is not None and self.max_model_len < config.max_model_len:
            logger.warning("max_model_len=%d is lowered to %d.", config.max_model_len, self.max_model_len)
        logger.info("%s", self.memory_budget)

        self.model = Decoder(self.spec, params, reference_ops(), self.max_model_len)
        self.numerics = _numerics(self.model, dtype, device)
        num_blocks = self.memory_budget.num_blocks
        storage = KVStorage(self.spec, num_blocks, config.block_size, dtype, device)
        self.runner = ModelRunner({POLICY: self.model}, storage)
        self.cache = CACHES[config.cache_type](num_blocks, config.block_size)
        self.weight_sync = WeightSyncManager(self.model)
        lookahead = config.lookahead if config.lookahead is not None else int(device.type == "cuda")
        self.loop = EngineLoop(self.cache, self.runner, config.scheduler, lookahead, self.numerics.fingerprint)
        self._lock = threading.RLock()  # held by whoever runs the loop
        self._request_ids = itertools.count()
        self._seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._announcing = threading.Lock()  # held while a weight update is staged and announced
        self._unclaimed: list[TrainingSample] = []  # for the next `step`
        self._collecting: dict[int, list[TrainingSample]] = {}  # request id -> where a running `generate` collects
        self._dead: str | None = None

    # -- generating ---------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (or the one at `tokenizer_path`), read when it is first asked for."""
        other = self.config.tokenizer_path
        return load_tokenizer(resolve_model(other) if other is not None else self.model_folder)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Iterable[SamplingParams],
        num_samples_per_prompt: int = 1,
        *,
        progress: Progress | None = None,
    ) -> list[TrainingSample]:
        """Complete prompts; returns the samples prompt by prompt, whatever order they finish in.

        Args:
            prompts: token ids of one prompt, or a list of prompts.
            sampling_params: one for all, or one for each prompt.
            num_samples_per_prompt: samples of each prompt; the prompt is computed once for all of them.
            progress: called after every step with (finished samples, samples in all, completion tokens so far).

        Samples of requests that others added are kept, and returned by the next `step()`.
        """
        self._require_alive()
        many = _many_prompts(prompts)
        each = _params_for(sampling_params, len(many))
        pairs = list(zip(many, each, strict=True))
        requests = [self._new_sequence(prompt, params, num_samples_per_prompt) for prompt, params in pairs]
        total, tokens_before = len(requests) * num_samples_per_prompt, self.loop.num_completion_tokens
        collected: list[TrainingSample] = []
        self._collecting.update((sequence.request_id, collected) for sequence in requests)
        mine = [self._add(sequence) for sequence in requests]
        try:
            while len(collected) < total:
                with self._lock:  # let go between steps, so that other threads may abort, add and update
                    self._unclaimed += self._deliver(self._step())
                    if len(collected) < total and not self.loop.has_pending():
                        raise RuntimeError(f"{total - len(collected)} samples were lost: a bug of the engine.")
                if progress is not None:
                    progress(len(collected), total, self.loop.num_completion_tokens - tokens_before)
        except BaseException:
            if self._dead is None:
                self.abort(mine)
            raise
        finally:
            for request_id in mine:
                self._collecting.pop(request_id, None)
        order = {request_id: place for place, request_id in enumerate(mine)}
        return sorted(collected, key=lambda s: (order[s.request_id], s.sample_index))

    def add_request(self, prompt: Any, params: SamplingParams, num_samples: int = 1) -> int:
        """Queue a request; returns its id, which its samples carry. Raises `InvalidRequest` or `RequestTooLarge`."""
        self._require_alive()
        return self._add(self._new_sequence(prompt, params, num_samples))

    def step(self) -> list[TrainingSample]:
        """Run one step; returns the samples that ended since the last call."""
        self._require_alive()
        with self._lock:
            kept, self._unclaimed = self._unclaimed, []
            return kept + self._deliver(self._step())

    def has_pending(self) -> bool:
        """Whether a call of `step` has anything to do or to return."""
        return self._dead is None and (bool(self._unclaimed) or self.loop.has_pending())

    def abort(self, request_ids: int | Iterable[int] | None = None) -> list[TrainingSample]:
        """End requests (None: all) now; returns their partial samples. Ids that are not live are passed over.

        A `generate` that waits for one of them returns its partial samples too.
        """
        self._require_alive()
        chosen = None
        if request_ids is not None:
            chosen = frozenset([request_ids] if isinstance(request_ids, int) else request_ids)
        with self._lock:
            ended = self._guarded(self.loop.handle)
            self.loop.inbox.append(Abort(chosen))
            ended += self._guarded(self.loop.handle)
            theirs, others = [], []
            for sample in ended:
                asked = sample.finish_reason == "abort" and (chosen is None or sample.request_id in chosen)
                (theirs if asked else others).append(sample)
            self._unclaimed += self._deliver(others)
            self._deliver(theirs)
        return theirs

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_weights(
        self, weights: Mapping[str, Tensor], blocking: bool = False, *, version: int | None = None
    ) -> WeightUpdate:
        """Replace (part of) the policy's weights, in place, between two steps.

        Args:
            weights: Hugging Face names to tensors, unfused; only what changed need be there.
            blocking: wait until the weights serve; running requests then recompute their context under them.
                Otherwise they are applied at the next step boundary (at once where nothing is in flight), and running
                requests go on with the keys and values that they have.
            version: number of the new version, larger than every one before; None counts up.

        Raises `WeightUpdateError`, with the old version serving untouched.
        """
        self._require_alive()
        held = self._lock.acquire(blocking=blocking)  # not held: another thread is stepping and will apply it
        try:
            # What is still in flight once every sequence has ended is an overrun: nobody would step to retire it.
            idle = not self.loop.in_flight or not self.loop.sequences.by_id
            at_once = held and (blocking or idle)
            with self._announcing:  # versions and messages in one order
                update = self.weight_sync.stage(weights, version=version, copy=not at_once)
                self.loop.inbox.append(ChangeWeights(POLICY, self.weight_sync.finish, recompute=blocking))
            if at_once:
                self._unclaimed += self._deliver(self._guarded(self.loop.handle))
        finally:
            if held:
                self._lock.release()
        return update

    def get_weight_version(self) -> int:
        """The version that serves now."""
        return self.weight_sync.version

    def flush_cache(self) -> None:
        """Forget every cached prefix. Never needed for correctness: a block's name holds its weight version."""
        self._require_alive()
        with self._lock:
            self.cache.flush()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the engine was built, and its state now."""
        loop = self.loop
        return EngineStats(
            num_waiting=len(loop.sequences.waiting),
            num_running=len(loop.sequences.running),
            num_free_blocks=self.cache.num_free_blocks(),
            num_blocks=self.cache.num_blocks,
            num_steps=loop.num_steps,
            num_preemptions=loop.num_preemptions,
            tokens_computed=self.runner.tokens_computed,
            prompt_tokens_computed=self.runner.prompt_tokens_computed,
            prompt_tokens_cached=loop.num_cached_tokens,
            completion_tokens=loop.num_completion_tokens,
        )

    def shutdown(self) -> None:
        """Let go of weights and KV cache. Unfinished requests are lost; every later call raises `EngineDead`."""
        with self._lock:
            if self._dead is None:
                self._dead = "the engine was shut down"
                self.model.params.clear()
                del self.runner.storage

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _deliver(self, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Hand samples to the `generate` that waits for them; returns the others."""
        others: list[TrainingSample] = []
        for sample in samples:
            self._collecting.get(sample.request_id, others).append(sample)
        return others

    def _step(self) -> list[TrainingSample]:
        return self._guarded(self.loop.step)

    def _guarded(self, run: Callable[[], list[TrainingSample]]) -> list[TrainingSample]:
        """Run part of the loop. What it raises leaves sequences and cache in an unknown state: the engine is dead."""
        self._require_alive()
        try:
            return run()
        except Exception as problem:
            self._dead = f"a step failed: {type(problem).__name__}: {problem}"
            raise EngineDead(self._dead) from problem

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"{self._dead}; build a new one.")

    def _add(self, sequence: Sequence) -> int:
        self.loop.inbox.append(Add(sequence))
        return sequence.request_id

    def _new_sequence(self, prompt: Any, params: SamplingParams, num_samples: int) -> Sequence:
        """Check a request and give it its ids. Nothing of the engine's state changes if it is refused."""
        token_ids = _token_ids(prompt, self.spec.vocab_size)
        _require_params(params, num_samples, self.spec.vocab_size)
        self._require_fit(len(token_ids), params.max_tokens)
        eos = frozenset[int]() if params.ignore_eos else frozenset(self.spec.eos_token_ids)
        if params.min_tokens and len(params.stop_token_ids | eos) >= self.spec.vocab_size:
            raise InvalidRequest(
                "every id of the whole vocabulary would end the sample, so min_tokens leaves nothing to draw."
            )
        return Sequence(
            seq_id=self.loop.sequences.new_id(),
            request_id=next(self._request_ids),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            params=params,
            stop_ids=params.stop_token_ids | eos,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            prefix=PrefixKeys(Namespace()),
            num_samples=num_samples,
        )

    def _require_fit(self, prompt_len: int, max_tokens: int) -> None:
        longest = prompt_len + max_tokens
        if prompt_len >= self.max_model_len:
            raise RequestTooLarge(
                f"the prompt of {prompt_len} tokens leaves no room in max_model_len={self.max_model_len}; at most "
                f"{self.max_model_len - 1} fit."
            )
        if longest > self.max_model_len:
            raise RequestTooLarge(
                f"prompt ({prompt_len}) and max_tokens={max_tokens} exceed max_model_len={self.max_model_len}; "
                f"max_tokens={self.max_model_len - prompt_len} would fit."
            )
        limit = self.config.max_tokens_per_batch
        if not self.config.enable_chunked_prefill and longest > limit:
            raise RequestTooLarge(
                f"prompt ({prompt_len}) and max_tokens={max_tokens} exceed max_tokens_per_batch={limit}, which bounds "
                f"a request without chunked prefill; enable it, or allow {longest} tokens a batch."
            )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not a device; use 'cpu', 'cuda' or 'cuda:N'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} is not available: torch {torch.__version__} sees no CUDA device.")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'.")
    return device


def _numerics(model: Decoder, dtype: torch.dtype, device: torch.device) -> Numerics:
    return Numerics(
        backend=model.ops.name,
        version=model.ops.version,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        torch=torch.__version__,
        # On a GPU the library chooses a kernel by the shape of a whole batch; nobody has checked that it keeps the law.
        schedule_invariant=model.ops.schedule_invariant and device.type == "cpu",
    )


def _many_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, also for a single one."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
        raise InvalidRequest(f"prompts must be lists of token ids, not {type(prompts).__name__}.")
    many = list(prompts)
    if not many:
        raise InvalidRequest("prompts is empty; give at least one prompt.")
    single = all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in many)
    return [many] if single else many


def _params_for(sampling_params: SamplingParams | Iterable[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Iterable):
        raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(sampling_params).__name__}.")
    each = list(sampling_params)
    if len(each) != num_prompts:
        raise InvalidRequest(f"{len(each)} sampling_params for {num_prompts} prompts; give one, or one for each.")
    return each


def _token_ids(prompt: Any, vocab_size: int) -> list[int]:
    if isinstance(prompt, str | bytes) or not hasattr(prompt, "__iter__"):
        raise InvalidRequest(f"a prompt must be a list of token ids, not {type(prompt).__name__}.")
    ids: list[int] = []
    for item in prompt:
        try:
            token_id = operator.index(item)
        except TypeError:
            raise InvalidRequest(f"token id {item!r} is not an integer.") from None
        if isinstance(item, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {item!r} is outside the vocabulary: 0 to {vocab_size - 1}.")
        ids.append(token_id)
    if not ids:
        raise InvalidRequest("the prompt is empty; give at least one token id.")
    return ids


def _require_params(params: Any, num_samples: Any, vocab_size: int) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, not {type(params).__name__}.")
    if not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 1:
        raise InvalidRequest(f"num_samples={num_samples!r} must be a positive integer.")
    outside = [token_id for token_id in params.stop_token_ids if token_id >= vocab_size]
    if outside:
        raise InvalidRequest(f"stop token id {min(outside)} is outside the vocabulary: 0 to {vocab_size - 1}.")

"""`InferenceEngine`: owns the loop and the parts it runs on; takes requests in and hands samples out."""

import itertools
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.engine.assembly import assemble
from nano_inference.engine.delivery import Delivery, Sink
from nano_inference.engine.loop import Abort, Add, ChangeWeights, EngineLoop
from nano_inference.engine.progress import Progress, progress_of
from nano_inference.engine.requests import RequestChecks, is_text, many_prompts, params_for
from nano_inference.engine.runner import ModelRunner
from nano_inference.engine.weight_sync import WeightSyncManager, WeightUpdate
from nano_inference.errors import EngineDead, InvalidRequest
from nano_inference.kv_cache.block_hash import Namespace, PrefixKeys
from nano_inference.scheduling.sequence import POLICY, REFERENCE, Sequence
from nano_inference.text.output_text import OutputText
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import Delta, EngineStats, SamplingParams, TrainingSample

if TYPE_CHECKING:
    from nano_inference.engine.async_engine import AsyncInferenceEngine

Params = SamplingParams | Iterable[SamplingParams]


class InferenceEngine:
    """Token ids in; tokens, logprobs and weight versions out. A context manager.

    One thread steps at a time; any thread may generate, add, abort or update. A request's failure is its own: what
    cannot be served is refused with a typed error before anything changes.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        parts = assemble(config)
        self.model = parts.models[POLICY]
        self.spec = self.model.spec
        self.numerics = parts.numerics
        self.memory_budget = parts.memory_budget
        self.model_folder = parts.folder
        self.max_model_len = self.memory_budget.max_model_len
        self.runner = ModelRunner(parts.models, parts.storages)
        self.cache = parts.cache
        self.weight_sync = WeightSyncManager(self.model)
        device = self.model.device
        lookahead = config.lookahead if config.lookahead is not None else int(device.type == "cuda")
        self.loop = EngineLoop(self.cache, self.runner, config.scheduler, lookahead, self.numerics.fingerprint)
        if REFERENCE in parts.models:
            self.loop.sequences.versions[REFERENCE] = 0
        self._checks = RequestChecks(config, self.spec, parts.folder, self.max_model_len)
        self._lock = threading.RLock()  # held by whoever runs the loop
        self._request_ids = itertools.count()
        self._seeds = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._announcing = threading.Lock()  # held while a weight update is staged and announced
        self._unclaimed: list[TrainingSample] = []  # for the next `step`
        self._delivery = Delivery()
        self._dead: str | None = None
        self.work_arrived = threading.Event()  # set whenever a message arrives; whoever waits for work clears it

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer (or the one at `tokenizer_path`), read when it is first asked for."""
        return self._checks.tokenizer

    # -- generating ---------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples_per_prompt: int = 1,
        *,
        stream: Literal[False] = False,
        progress: Progress = None,
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
    ) -> Iterator[Delta]: ...
    def generate(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples_per_prompt: int = 1,
        *,
        stream: bool = False,
        progress: Progress = None,
    ) -> list[TrainingSample] | Iterator[Delta]:
        """Complete prompts; returns the samples prompt by prompt, whatever order they finish in.

        Args:
            prompts: one prompt or a list of them. A prompt is token ids, a string, or a chat (a list of messages
                `{"role": ..., "content": ...}`, put into the model's template). Samples of text have `text`.
            sampling_params: one for all, or one for each prompt.
            num_samples_per_prompt: samples of each prompt; the prompt is computed once for all of them.
            stream: return an iterator of `Delta` instead: pieces of all samples as they grow. Closing it aborts.
            progress: True shows a bar, False none, None one where generation is long and stderr is a terminal. Or a
                function that is called after every step with (finished samples, samples in all, completion tokens).

        Samples of requests that others added are kept, and returned by the next `step()`. Raises `InvalidRequest` or
        `RequestTooLarge` before anything is added, and `EngineDead`.
        """
        requests = self._requests(prompts, sampling_params, num_samples_per_prompt, stream)
        deltas = self._run(requests, progress)
        if stream:
            return deltas
        order = {request.request_id: place for place, request in enumerate(requests)}
        samples = [delta.finished for delta in deltas if delta.finished is not None]
        return sorted(samples, key=lambda s: (order[s.request_id], s.sample_index))

    def generate_text(
        self, prompt: str | list[str], sampling_params: SamplingParams | None = None, *, stream: bool = False
    ) -> Any:
        """Text to text. A string gives a string, a list a list; streaming, pieces of text, or (place, piece) pairs."""
        params = sampling_params or SamplingParams()
        if not isinstance(prompt, str) and not all(isinstance(each, str) for each in prompt):
            raise InvalidRequest("generate_text takes a string or a list of strings; generate takes all other prompts.")
        if stream:
            requests = self._requests(prompt, params, 1, stream=True)
            places = {request.request_id: place for place, request in enumerate(requests)}
            pieces = ((places[delta.request_id], delta.text) for delta in self._run(requests, False) if delta.text)
            return (text for _, text in pieces) if isinstance(prompt, str) else pieces
        texts = [sample.text for sample in self.generate(prompt, params)]
        return texts[0] if isinstance(prompt, str) else texts

    async def generate_async(self, prompt: Any, sampling_params: SamplingParams | None = None) -> AsyncIterator[str]:
        """Pieces of text of one prompt, for asyncio. A thread of the engine's own steps it."""
        async for delta in self._async_engine.stream(prompt, sampling_params or SamplingParams()):
            if delta.text:
                yield delta.text

    def add_request(self, prompt: Any, params: SamplingParams, num_samples: int = 1) -> int:
        """Queue a request; returns its id, which its samples carry. Raises `InvalidRequest` or `RequestTooLarge`."""
        self._require_alive()
        return self._add(self._new_sequence(prompt, params, num_samples, stream=False))

    def submit(self, prompt: Any, params: SamplingParams, num_samples: int, sink: Sink, *, stream: bool) -> int:
        """Queue a request whose deltas go to `sink`, called by whoever steps; returns its id.

        Without `stream` there is one delta a sample, when it has ended. For engines around this one.
        """
        self._require_alive()
        sequence = self._new_sequence(prompt, params, num_samples, stream)
        self._delivery.open(sequence.request_id, num_samples, sink)
        return self._add(sequence)

    def run_sequences(self, sequences: list[Sequence]) -> Generator[Delta, None, None]:
        """Add sequences with ids from `new_ids` and step until they have ended. For functions around this engine."""
        self._require_alive()
        return self._run(sequences, progress=False)

    def new_ids(self) -> tuple[int, int]:
        """A sequence id and a request id that were never used."""
        return self.loop.sequences.new_id(), next(self._request_ids)

    def step(self) -> list[TrainingSample]:
        """Run one step; returns the samples that ended since the last call."""
        self.advance()
        with self._lock:
            kept, self._unclaimed = self._unclaimed, []
        return kept

    def advance(self) -> None:
        """Run one step and hand its samples to those who wait for them; `step` returns the others."""
        with self._lock:
            self._deliver(self._guarded(self.loop.step))

    def has_pending(self) -> bool:
        """Whether a call of `step` has anything to do or to return."""
        return self._dead is None and (bool(self._unclaimed) or self.loop.has_pending())

    def abort(self, request_ids: int | Iterable[int] | None = None) -> list[TrainingSample]:
        """End requests (None: all) now; returns their partial samples. Ids that are not live are passed over.

        A `generate` that waits for one of them returns its partial samples too. A sample that is finished and waits for
        its reference logprobs is returned as it is, without them.
        """
        self._require_alive()
        chosen = _request_ids(request_ids)
        with self._lock:
            self._deliver(self._guarded(self.loop.handle))
            self.loop.inbox.append(Abort(chosen))
            ended = self._guarded(self.loop.handle)
            before = len(self._unclaimed)
            self._deliver(ended)
            del self._unclaimed[before:]
        return ended

    def abort_soon(self, request_ids: int | Iterable[int]) -> None:
        """End requests at the next step boundary, without waiting for it."""
        self.loop.inbox.append(Abort(_request_ids(request_ids)))
        self.work_arrived.set()

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
                self.work_arrived.set()
            if at_once:
                self._deliver(self._guarded(self.loop.handle))
        finally:
            if held:
                self._lock.release()
        return update

    def between_steps(self, weight_set: str, change: Callable[[], int | None]) -> None:
        """Call `change` with nothing in flight. What it returns is the weight set's new version; None: as it was."""
        self._require_alive()
        with self._lock:
            self.loop.inbox.append(ChangeWeights(weight_set, change, recompute=True))
            self.work_arrived.set()
            self._deliver(self._guarded(self.loop.handle))

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
        loop, runner = self.loop, self.runner
        num_free, num_blocks = self.cache.num_free_blocks(), self.cache.num_blocks
        seconds = loop.clock.seconds
        return EngineStats(
            num_waiting=len(loop.sequences.waiting),
            num_running=len(loop.sequences.running),
            num_free_blocks=num_free,
            num_blocks=num_blocks,
            kv_use=self.cache.share_in_use(),
            num_steps=loop.num_steps,
            num_preemptions=loop.num_preemptions,
            tokens_computed=runner.tokens_computed,
            prompt_tokens_computed=runner.prompt_tokens_computed,
            prompt_tokens_cached=loop.num_cached_tokens,
            hit_rate=loop.num_cached_tokens / max(loop.num_cached_tokens + runner.prompt_tokens_computed, 1),
            completion_tokens=loop.num_completion_tokens,
            tokens_per_second=loop.num_completion_tokens / seconds if seconds else 0.0,
            step_microseconds=loop.clock.microseconds(loop.num_steps),
        )

    def shutdown(self) -> None:
        """Let go of weights and KV cache. Unfinished requests are lost; every later call raises `EngineDead`."""
        if "_async_engine" in self.__dict__:
            self._async_engine.stop()
        with self._lock:
            if self._dead is None:
                self._dead = "the engine was shut down"
                for model in self.runner.models.values():
                    model.close()
                self.runner.storages.clear()
                self.work_arrived.set()

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @cached_property
    def _async_engine(self) -> "AsyncInferenceEngine":
        from nano_inference.engine.async_engine import AsyncInferenceEngine

        return AsyncInferenceEngine(self)

    def _requests(self, prompts: Any, sampling_params: Params, num_samples: int, stream: bool) -> list[Sequence]:
        """One checked request a prompt; none is added."""
        self._require_alive()
        many = many_prompts(prompts)
        pairs = zip(many, params_for(sampling_params, len(many)), strict=True)
        return [self._new_sequence(prompt, params, num_samples, stream) for prompt, params in pairs]

    def _run(self, requests: list[Sequence], progress: Progress) -> Generator[Delta, None, None]:
        """Add requests and step until they have ended, yielding their deltas. Closing it aborts what is left."""
        left = sum(request.width for request in requests)
        arrived: deque[Delta] = deque()
        show = progress_of(progress, left, self)
        request_ids = [request.request_id for request in requests]
        for request in requests:
            self._delivery.open(request.request_id, request.width, arrived.append)
        try:
            for request in requests:
                self._add(request)
            while left:
                with self._lock:  # let go between steps, so that other threads may abort, add and update
                    if not arrived:
                        self.advance()
                    if not arrived and not self.loop.has_pending():
                        raise RuntimeError(f"{left} samples were lost: a bug of the engine.")
                while arrived:
                    delta = arrived.popleft()
                    left -= delta.finished is not None
                    yield delta
                show(left)
        finally:
            show.close()
            unfinished = self._delivery.abandon(request_ids)
            if unfinished and self._dead is None:
                self.abort(unfinished)

    def _deliver(self, samples: list[TrainingSample]) -> None:
        """Hand deltas and samples to those who wait for them; the others wait for `step`."""
        streamed, self.loop.streamed = self.loop.streamed, []
        self._unclaimed += self._delivery.hand_out(streamed, samples)

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
        self.work_arrived.set()
        return sequence.request_id

    def _new_sequence(self, prompt: Any, params: SamplingParams, num_samples: int, stream: bool) -> Sequence:
        """Check a request and give it its ids. Nothing of the engine's state changes if it is refused."""
        checks = self._checks
        token_ids = checks.token_ids(prompt)
        checks.require(len(token_ids), params, num_samples)
        stop_ids = checks.stop_ids(params)
        text = None
        if params.stop or is_text(prompt):
            text = OutputText(checks.need_tokenizer("a stop string"), params.stop)
        return Sequence(
            seq_id=self.loop.sequences.new_id(),
            request_id=next(self._request_ids),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            params=params,
            stop_ids=stop_ids,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            prefix=PrefixKeys(Namespace()),
            num_samples=num_samples,
            scored=range(len(token_ids) - 1) if params.prompt_logprobs else range(0),
            output_text=text,
            streaming=stream,
        )


def _request_ids(request_ids: int | Iterable[int] | None) -> frozenset[int] | None:
    if request_ids is None:
        return None
    return frozenset([request_ids] if isinstance(request_ids, int) else request_ids)

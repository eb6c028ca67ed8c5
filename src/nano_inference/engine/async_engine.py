"""`AsyncInferenceEngine`: the engine for asyncio. One thread steps it, and any number of callers
await it.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from nano_inference.config import EngineConfig
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.generation import in_order
from nano_inference.engine.requests import many_prompts, params_for
from nano_inference.engine.shared_loop import failed
from nano_inference.errors import EngineDead, InvalidRequest
from nano_inference.types import Delta, PauseMode, SamplingParams, TrainingSample, UpdateOptions


class _Listener:
    """Deltas of one caller, on their way from the stepping thread to its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.request_ids: list[int] = []
        self.left = 0  # samples that have not arrived
        self.closed = False
        self._loop = loop
        self._queue: asyncio.Queue[Delta | EngineDead] = asyncio.Queue()

    def expect(self, request_id: int, num_samples: int) -> None:
        """Expect this number of samples of a request."""
        self.request_ids.append(request_id)
        self.left += num_samples

    def take(self, item: Delta | EngineDead) -> None:
        """Pass an item to the event loop. The stepping thread calls this."""
        if not self.closed:
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
            except RuntimeError:  # the event loop was closed without cancelling its tasks
                self.closed = True

    async def next(self) -> Delta:
        """Return the next delta. Raises `EngineDead`."""
        item = await self._queue.get()
        if isinstance(item, EngineDead):
            raise item
        self.left -= item.finished is not None
        return item


class AsyncInferenceEngine:
    """Engine for asyncio: await samples, stream them, update weights. Cancelling a task that awaits
    a request aborts the request.

    The stepping thread sleeps while there is no work. Several event loops may share the engine.
    """

    def __init__(self, config_or_engine: EngineConfig | InferenceEngine) -> None:
        source = config_or_engine
        self.engine = InferenceEngine(source) if isinstance(source, EngineConfig) else source
        self._owned = self.engine is not source
        self._listeners: set[_Listener] = set()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._step_on, name="nano-inference steps", daemon=True
        )
        self._thread.start()

    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Iterable[SamplingParams],
        num_samples_per_prompt: int = 1,
        *,
        num_wanted: int | None = None,
        request_id: int | None = None,
    ) -> list[TrainingSample]:
        """Return the samples of all prompts, prompt by prompt, as `InferenceEngine.generate` does.

        To abort a single prompt from another task, pass a new `request_id` from
        `engine.intake.new_request_id()`. With several prompts it raises `InvalidRequest`.
        """
        many = many_prompts(prompts)
        if request_id is not None and len(many) != 1:
            raise InvalidRequest(
                f"request_id={request_id} identifies one request, but there are {len(many)} "
                "prompts; pass one prompt."
            )
        all_params = params_for(sampling_params, len(many))
        deltas: list[Delta] = []
        with self._listen() as listener:
            for prompt, params in zip(many, all_params, strict=True):
                options = {"num_wanted": num_wanted, "request_id": request_id}
                self._submit(
                    listener, prompt, params, num_samples_per_prompt, stream=False, **options
                )
            while listener.left:
                deltas.append(await listener.next())
            return in_order(deltas, listener.request_ids)

    async def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        num_wanted: int | None = None,
    ) -> AsyncIterator[Delta]:
        """Yield deltas of one prompt's samples as they grow. The last delta of each sample has the
        whole sample in `finished`.
        """
        with self._listen() as listener:
            self._submit(
                listener, prompt, sampling_params, num_samples, stream=True, num_wanted=num_wanted
            )
            while listener.left:
                yield await listener.next()

    async def resume_from(
        self,
        sample: TrainingSample,
        *,
        append: Iterable[int] = (),
        max_new_tokens: int | None = None,
        version: int | None = None,
    ) -> TrainingSample:
        """Resume a sample as `InferenceEngine.resume_from` does, and return it when it has
        ended.
        """
        with self._listen() as listener:
            self._require_running()
            options = {
                "append": append,
                "max_new_tokens": max_new_tokens,
                "version": version,
                "sink": listener.take,
            }

            def begin() -> None:
                listener.expect(self.engine.resume_from(sample, **options), 1)
                if listener.closed:  # cancelled meanwhile
                    self.engine.abort_soon(listener.request_ids)

            await asyncio.to_thread(begin)  # may wait for the running step
            self._require_running()
            while True:
                delta = await listener.next()
                if delta.finished is not None:
                    return delta.finished

    async def update_weights(
        self, weights: Any, blocking: bool = False, **options: Unpack[UpdateOptions]
    ) -> int:
        """Update the weights as `InferenceEngine.update_weights` does. Return their version once
        they are live.
        """
        update = await asyncio.to_thread(self.engine.update_weights, weights, blocking, **options)
        while not update.done():  # the stepping thread applies it between two steps
            self._require_running()
            await asyncio.to_thread(update.wait, 1.0)
        return update.result(0)

    async def pause(self, mode: PauseMode = "keep") -> list[TrainingSample]:
        """Pause as `InferenceEngine.pause` does. Return the partial samples of `mode="abort"`."""
        return await asyncio.to_thread(self.engine.pause, mode)

    async def resume(self) -> None:
        """Resume as `InferenceEngine.resume` does."""
        await asyncio.to_thread(self.engine.resume)

    def stop(self) -> None:
        """Stop stepping, after the running step. Pending calls raise `EngineDead`. The engine
        itself is shut down only if this object built it.
        """
        self._stopping = True
        self.engine.shared.work_arrived.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._fail(EngineDead("the engine was stopped."))
        if self._owned:
            self.engine.shutdown()

    async def __aenter__(self) -> "AsyncInferenceEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _submit(
        self,
        listener: "_Listener",
        prompt: Any,
        params: SamplingParams,
        num_samples: int,
        *,
        stream: bool,
        num_wanted: int | None = None,
        request_id: int | None = None,
    ) -> int:
        self._require_running()
        options = {"stream": stream, "num_wanted": num_wanted, "request_id": request_id}
        request_id = self.engine.submit(prompt, params, num_samples, listener.take, **options)
        listener.expect(request_id, num_samples)
        self._require_running()  # the engine may have stopped before it could notify this listener
        return request_id

    @contextmanager
    def _listen(self) -> Iterator["_Listener"]:
        """Yield a listener. Requests that have not ended at the end of the context are aborted."""
        listener = _Listener(asyncio.get_running_loop())
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            listener.closed = True
            if listener.left:
                self.engine.abort_soon(listener.request_ids)

    def _step_on(self) -> None:
        """Step while there is work, otherwise sleep until some arrives. Runs in the stepping
        thread.
        """
        engine = self.engine
        try:
            while not self._stopping:
                engine.shared.work_arrived.wait()
                engine.shared.work_arrived.clear()
                # an engine that died while paused has no work, but its callers need the error
                engine.shared.require_alive()
                while engine.shared.has_work() and not self._stopping:
                    engine.shared.advance()
        except EngineDead as problem:
            self._fail(problem)
        except BaseException as problem:
            # a bug: without a stepping thread all callers would wait forever
            dead = failed("the stepping thread has ended", problem)
            self.engine.shared.end(dead.public)
            self._fail(EngineDead(dead.text, dead.public))
            raise

    def _fail(self, problem: EngineDead) -> None:
        for listener in list(self._listeners):
            listener.take(problem)

    def _require_running(self) -> None:
        if self._stopping or not self._thread.is_alive():
            raise EngineDead("the engine was stopped or has failed; build a new one.")

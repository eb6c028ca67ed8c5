"""`AsyncInferenceEngine`: the same engine for asyncio. One thread steps it; any number of callers
await.
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
    """One caller's deltas on their way from the stepping thread to its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.request_ids: list[int] = []
        self.left = 0  # samples that have not arrived
        self.closed = False
        self._loop = loop
        self._queue: asyncio.Queue[Delta | EngineDead] = asyncio.Queue()

    def expect(self, request_id: int, num_samples: int) -> None:
        """So many samples of a request will arrive."""
        self.request_ids.append(request_id)
        self.left += num_samples

    def take(self, item: Delta | EngineDead) -> None:
        """Called by the stepping thread."""
        if not self.closed:
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
            except RuntimeError:  # the event loop was closed without cancelling its tasks
                self.closed = True

    async def next(self) -> Delta:
        """The next delta. Raises `EngineDead`."""
        item = await self._queue.get()
        if isinstance(item, EngineDead):
            raise item
        self.left -= item.finished is not None
        return item


class AsyncInferenceEngine:
    """Await samples, stream them, update weights. Cancelling what awaits a request aborts it.

    The stepping thread sleeps while there is nothing to do. May be used from several event loops.
    """

    def __init__(self, config_or_engine: EngineConfig | InferenceEngine) -> None:
        given = config_or_engine
        self.engine = InferenceEngine(given) if isinstance(given, EngineConfig) else given
        self._owned = self.engine is not given
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
        """As `InferenceEngine.generate`: the samples of all prompts, prompt by prompt.

        `request_id` is for a single prompt that another task may want to abort meanwhile: a new
        one, from `engine.intake.new_request_id()`. Raises `InvalidRequest` for more prompts than
        that.
        """
        many = many_prompts(prompts)
        if request_id is not None and len(many) != 1:
            raise InvalidRequest(
                f"request_id={request_id} is the id of one request, and there are {len(many)} "
                "prompts."
            )
        each = params_for(sampling_params, len(many))
        deltas: list[Delta] = []
        with self._listen() as listener:
            for prompt, params in zip(many, each, strict=True):
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
        """Pieces of one prompt's samples as they grow; each sample's last piece has it whole, in
        `finished`.
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
        """As `InferenceEngine.resume_from`, and waits for the sample."""
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

            await asyncio.to_thread(begin)  # waits for a step
            self._require_running()
            while True:
                delta = await listener.next()
                if delta.finished is not None:
                    return delta.finished

    async def update_weights(
        self, weights: Any, blocking: bool = False, **options: Unpack[UpdateOptions]
    ) -> int:
        """As `InferenceEngine.update_weights`, and waits until the weights serve; returns their
        version.
        """
        update = await asyncio.to_thread(self.engine.update_weights, weights, blocking, **options)
        while not update.done():  # the stepping thread applies it between two steps
            self._require_running()
            await asyncio.to_thread(update.wait, 1.0)
        return update.result(0)

    async def pause(self, mode: PauseMode = "keep") -> list[TrainingSample]:
        """As `InferenceEngine.pause`."""
        return await asyncio.to_thread(self.engine.pause, mode)

    async def resume(self) -> None:
        """As `InferenceEngine.resume`."""
        await asyncio.to_thread(self.engine.resume)

    def stop(self) -> None:
        """Stop stepping. What is awaited raises `EngineDead`; the engine itself is shut down only
        if it was made here.

        Waits for the step that is running.
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
        self._require_running()  # it may have stopped meanwhile and missed this one
        return request_id

    @contextmanager
    def _listen(self) -> Iterator["_Listener"]:
        """A listener for as long as it is awaited; what has not ended then is aborted."""
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
        """The thread: step while there is work, else sleep until some arrives."""
        engine = self.engine
        try:
            while not self._stopping:
                engine.shared.work_arrived.wait()
                engine.shared.work_arrived.clear()
                # a paused engine has no work, and those who await it are to be told
                engine.shared.require_alive()
                while engine.shared.has_work() and not self._stopping:
                    engine.shared.advance()
        except EngineDead as problem:
            self._fail(problem)
        except BaseException as problem:
            # a bug: nothing would step any more, and all would wait for ever
            dead = failed("the thread that steps has ended", problem)
            self.engine.shared.end(dead.public)
            self._fail(EngineDead(dead.text, dead.public))
            raise

    def _fail(self, problem: EngineDead) -> None:
        for listener in list(self._listeners):
            listener.take(problem)

    def _require_running(self) -> None:
        if self._stopping or not self._thread.is_alive():
            raise EngineDead("the engine was stopped or has failed; build a new one.")

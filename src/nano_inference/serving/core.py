"""`EngineCore`: the step loop of an engine that is told by messages and answers by messages."""

import os
import threading
from collections.abc import Callable

from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import EngineDead, NanoInferenceError
from nano_inference.serving.client import renamed
from nano_inference.serving.messages import (
    Abort,
    Call,
    Dead,
    EngineInfo,
    Failed,
    FromEngine,
    Generate,
    Outputs,
    Refused,
    Returned,
    Stop,
    ToEngine,
)
from nano_inference.types import Delta

# What a `Call` may name.
_METHODS: dict[str, Callable[[InferenceEngine], object]] = {
    "stats": InferenceEngine.stats,
    "get_weight_version": InferenceEngine.get_weight_version,
    "flush_cache": InferenceEngine.flush_cache,
}


class EngineCore:
    """Steps an engine on the thread that calls `run`; `handle` may be called by another.

    Args:
        engine: it.
        emit: takes what there is to tell, called by the thread that steps and the one that handles.
    """

    def __init__(self, engine: InferenceEngine, emit: Callable[[FromEngine], None]) -> None:
        self.engine = engine
        self._emit = emit
        self._stopping = False
        self._deltas: list[Delta] = []
        self._ids: dict[int, int] = {}  # the other side's request ids -> the engine's
        self._lock = threading.Lock()

    def info(self) -> EngineInfo:
        """What the other side must know."""
        engine = self.engine
        folder = engine.config.tokenizer_path or engine.model_folder
        return EngineInfo(
            model_path=engine.config.model_path,
            tokenizer_folder=str(folder),
            max_model_len=engine.max_model_len,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=tuple(engine.spec.eos_token_ids),
            max_batch_size=engine.config.max_batch_size,
            numerics=engine.numerics.fingerprint,
            weight_version=engine.get_weight_version(),
            pid=os.getpid(),
        )

    def run(self) -> None:
        """Step while there is work, sleep while there is none, until a `Stop` comes or the engine has died."""
        shared = self.engine.shared
        try:
            while not self._stopping:
                shared.work_arrived.wait()
                shared.work_arrived.clear()
                shared.require_alive()
                while shared.has_work() and not self._stopping:
                    shared.advance()
                    self._flush()
        except EngineDead as problem:
            self._emit(Dead(str(problem)))

    def handle(self, message: ToEngine) -> None:
        """Take in a message."""
        match message:
            case Generate():
                self._generate(message)
            case Abort(request_ids):
                self.engine.abort_soon([self._ids[each] for each in request_ids if each in self._ids])
            case Call():
                self._call(message)
            case Stop():
                self._stopping = True
                self.engine.shared.work_arrived.set()

    def _generate(self, message: Generate) -> None:
        outer, left = message.request_id, message.num_samples

        def sink(delta: Delta) -> None:
            nonlocal left
            self._deltas.append(renamed(delta, outer))
            if delta.finished is not None:
                left -= 1
                if not left:
                    self._ids.pop(outer, None)

        try:
            inner = self.engine.submit(message.prompt, message.params, message.num_samples, sink, stream=message.stream)
            self._ids[outer] = inner
        except NanoInferenceError as problem:
            self._emit(Refused(outer, type(problem).__name__, str(problem)))

    def _call(self, message: Call) -> None:
        try:
            value = _METHODS[message.name](self.engine, **message.arguments)
            self._emit(Returned(message.call_id, value))
        except NanoInferenceError as problem:
            self._emit(Failed(message.call_id, type(problem).__name__, str(problem)))

    def _flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._emit(Outputs(deltas))

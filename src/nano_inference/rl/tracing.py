"""Search for an operation whose bits depend on the schedule.

A sample's tokens run through the decoder under pairs of schedules, operation by operation.

A sample carries no activations, so a differing replay cannot be compared with the original run. But
if some operation's bits depend on the schedule, the same tokens show it. The schedules are: in one
chunk and token by token, one operation at a time and compiled, on the engine's threads and on one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from nano_inference.arrays import Dtype, Tensor, as_torch, namespace
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.interface import Ops
from nano_inference.ops.rowwise import Norm
from nano_inference.rl.comparison import OF_PROMPT, Difference
from nano_inference.rl.history import stretches
from nano_inference.rl.replay_run import Draws
from nano_inference.rl.replayer import MOST_ROWS, Replayer
from nano_inference.sampling.tensors import sampling_batch
from nano_inference.types import TrainingSample
from nano_inference.weights.update import WeightSet

# The last rows are computed one at a time, earlier ones in one chunk. The difference is in the last
# row, and a single operation costs much more than its share of a compiled step.
MOST_SINGLE = 64

WHOLE, SINGLE = "in one chunk", "token by token"
COMPILED, COMPILED_SINGLE, ONE_THREAD = (
    "compiled, in one chunk",
    "compiled, token by token",
    "on one thread",
)


class OperationDifference(NamedTuple):
    """The first operation whose bits differ between two schedules.

    Attributes:
        layer: Layer of the operation. None: before the first or after the last layer.
        operation: Name in `Ops`, and the parameter that it reads.
        position: Position of the first row that differs.
        schedules: The two schedules.
    """

    layer: int | None
    operation: str
    position: int
    schedules: tuple[str, str]

    def __str__(self) -> str:
        location = "outside the layers" if self.layer is None else f"layer {self.layer}"
        return (
            f"{location}, {self.operation}: the row at position {self.position} has different bits "
            f"{self.schedules[0]} and {self.schedules[1]}"
        )


class Diagnosis(NamedTuple):
    """Cause of a replay's difference, as far as this engine can determine it.

    Attributes:
        operation: First operation whose bits depend on the schedule; None if there is none.
        weight_version, weights_sha256: Version and checksum of the weights used.
    """

    operation: OperationDifference | None
    weight_version: int
    weights_sha256: str

    def __str__(self) -> str:
        if self.operation is not None:
            return str(self.operation)
        return (
            "every operation gives the same bits under every schedule tried, so the weights or the "
            "recorded fields differ from those that made the sample; checked weights: version "
            f"{self.weight_version}, SHA-256 {self.weights_sha256}"
        )


@torch.inference_mode()
def diagnose(replayer: Replayer, sample: TrainingSample, difference: Difference) -> Diagnosis:
    """Compare schedules on a sample's tokens, up to the first one whose replay differs.

    Raises the errors of `replay`.
    """
    engine = replayer.engine
    params = replayer.check(sample)
    with engine.shared.lock:
        engine.shared.require_weights()
        replayer.decoders.renew()
        tokens = [*sample.prompt_tokens, *sample.completion_tokens][: _num_rows(sample, difference)]
        version = _version_at(sample, len(tokens) - 1, engine.get_weight_version())
        storage, table = replayer.storage(engine.model, len(tokens))
        model = replayer.decoders.get(version)
        draws = replayer.draws(sample, params)
        schedules = _Schedules(model, tokens, storage, table, draws)
        return Diagnosis(schedules.first_difference(), version, WeightSet(model).content_hash())


def _num_rows(sample: TrainingSample, difference: Difference) -> int:
    """Return the number of rows that precede the differing token, or of all rows."""
    prompt, completion = len(sample.prompt_tokens), len(sample.completion_tokens)
    token = completion - 1 if difference.token is None else difference.token
    return max(1, token if difference.field in OF_PROMPT else prompt + min(token, completion - 1))


def _version_at(sample: TrainingSample, row: int, serving: int) -> int:
    for stretch in stretches(sample):
        if row < len(stretch.row_versions):
            return stretch.row_versions[row]
    return serving


class _Step(NamedTuple):
    layer: int | None
    operation: str


@dataclass
class _Trace:
    """Results of a schedule: a mark of every row for each call, in order.

    Equal marks mean equal bits.
    """

    steps: list[_Step] = field(default_factory=list)
    marks: list[list[Tensor]] = field(default_factory=list)  # [step][chunk] of int64 [rows]

    def against(self, other: "_Trace", schedules: tuple[str, str]) -> OperationDifference | None:
        for step, mine, theirs in zip(self.steps, self.marks, other.marks, strict=True):
            rows = (torch.cat(mine) != torch.cat(theirs)).nonzero()
            if len(rows):
                return OperationDifference(step.layer, step.operation, int(rows[0]), schedules)
        return None


class _Schedules:
    """Different ways to compute the same tokens."""

    def __init__(
        self,
        model: Decoder,
        tokens: Sequence[int],
        storage: KVStorage,
        table: list[int],
        draws: Draws,
    ) -> None:
        self.model, self.tokens, self.storage, self.table, self.draws = (
            model,
            tokens,
            storage,
            table,
            draws,
        )
        together = max(len(tokens) - MOST_SINGLE, 0)
        self.single = [*([together] if together else []), *range(together + 1, len(tokens) + 1)]
        self.whole = [len(tokens)]

    def first_difference(self) -> OperationDifference | None:
        """Return the first operation whose bits depend on the schedule, or None."""
        whole = self._one_by_one(self.model.ops, self.whole)
        difference = whole.against(self._one_by_one(self.model.ops, self.single), (WHOLE, SINGLE))
        if difference is None and self.model.ops.compile is not None:
            plain, compiled = self._outcome(self.whole, compiled=False), self._outcome(self.whole)
            difference = plain.against(compiled, (WHOLE, COMPILED))
            difference = difference or compiled.against(
                self._outcome(self.single), (COMPILED, COMPILED_SINGLE)
            )
        return difference or whole.against(self._on_one_thread(), (WHOLE, ONE_THREAD))

    def _on_one_thread(self) -> _Trace:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._one_by_one(
                cpu_ops(1, sums=self.model.ops.sums)
                if self.model.ops.name == "cpu"
                else self.model.ops,
                self.whole,
            )
        finally:
            torch.set_num_threads(before)

    def _one_by_one(self, ops: Ops, ends: Sequence[int]) -> _Trace:
        """Trace the trunk's operations (`_Tracer.around`), then the logits and the draw."""
        trace = _Trace()
        for start, batch in self._batches(ends):
            tracer = _Tracer(self.model, trace, batch)
            around = tracer.around(_plain(ops, self.model.dtype))
            hidden = self.model.trunk(around, batch, self.storage)
            self._head(ops, tracer, hidden, start)
        _name_layers(trace)
        return trace

    def _head(self, ops: Ops, tracer: "_Tracer", hidden: Tensor, start: int) -> None:
        weight, scale = self.model.head, self.model.spec.logit_scale
        logits: list[Tensor] = []
        drawn: list[Tensor] = []
        for first in range(0, len(hidden), MOST_ROWS):
            rows = hidden[first : first + MOST_ROWS]
            logits.append(_marks(ops.logits(rows, weight, scale)))
            positions = range(start + first + 1, start + first + len(rows) + 1)
            requests = [
                self.draws.request(self.tokens, row, position)
                for row, position in enumerate(positions)
            ]
            batch = sampling_batch(requests, rows.device)
            draw = ops.sample(rows, weight, scale, batch)
            parts = (draw.token_ids, draw.logprobs, draw.raw_logprobs, draw.log_kept_mass)
            marks = [_marks(part[:, None]) * (3**place) for place, part in enumerate(parts)]
            drawn.append(sum(marks))  # pyright: ignore
        tracer.note("logits", torch.cat(logits))
        tracer.note("sample", torch.cat(drawn))

    def _outcome(self, ends: Sequence[int], *, compiled: bool = True) -> _Trace:
        """Trace keys and values of every layer, and the rows after the last norm."""
        model, hidden = self.model, list[Tensor]()
        if not compiled:
            model = model.twin(ops=replace(_plain(model.ops, model.dtype), compile=None))
        batch = None
        for _, batch in self._batches(ends):
            hidden.append(_marks(model.forward(batch, self.storage).hidden))
        assert batch is not None
        trace = _Trace()
        places = namespace(model.device).arange(len(self.tokens), device=model.device)
        for layer in range(model.spec.num_layers):
            trace.steps.append(_Step(layer, "keys and values"))
            trace.marks.append([_stored_marks(self.storage, layer, places)])
        trace.steps.append(_Step(None, "rms_norm (norm)"))
        trace.marks.append(hidden)
        return trace

    def _batches(self, ends: Sequence[int]) -> Iterator[tuple[int, ForwardBatch]]:
        start, size = 0, self.storage.block_size
        for end in ends:
            rows = Rows(self.tokens[start:end], start, self.table[: -(-end // size)])
            draws, device = range(end - start), self.model.device
            yield start, batch_of_rows([rows], size, draws=draws, device=device)
            start = end


class _Tracer:
    """Wraps operations to record a mark of every row that they return."""

    def __init__(self, model: Decoder, trace: _Trace, batch: ForwardBatch) -> None:
        self._names = {id(param): name for name, param in model.params.items()}
        self._trace, self._batch = trace, batch
        self._calls = 0

    def around(self, ops: Ops) -> Ops:
        """Return the operations, with tracing of the most common ones.

        A difference in another operation shows in the next traced one.
        """
        return replace(
            ops,
            embed=self._traced("embed", ops.embed, weight_at=1),
            linear=self._traced("linear", ops.linear, weight_at=1),
            rms_norm=self._traced("rms_norm", ops.rms_norm, weight_at=2),
            rope_and_store=self._traced(
                "rope_and_store", ops.rope_and_store, layer_at=5, view_at=4
            ),
            attention=self._traced("attention", ops.attention, layer_at=2),
            gate=self._traced("gate", ops.gate),
            moe=self._traced("moe", ops.moe, experts_at=1),
        )

    def note(self, operation: str, marks: Tensor, layer: int | None = None) -> None:
        """Record the row marks of the next call."""
        if self._calls == len(self._trace.steps):
            self._trace.steps.append(_Step(layer, operation))
            self._trace.marks.append([])
        self._trace.marks[self._calls].append(marks)
        self._calls += 1

    def _traced(
        self,
        operation: str,
        run: Callable[..., Any],
        *,
        weight_at: int | None = None,
        experts_at: int | None = None,
        layer_at: int | None = None,
        view_at: int | None = None,
    ) -> Callable[..., Any]:
        def traced(*arguments: Any) -> Any:
            out = run(*arguments)
            marks = sum(_marks(part) for part in (out if isinstance(out, tuple) else (out,)))
            layer = None if layer_at is None else arguments[layer_at]
            if view_at is not None:  # stored keys and values are part of the result
                marks = marks + 3 * _stored_marks(
                    arguments[view_at], arguments[layer_at or 0], self._batch.positions
                )
            name = operation
            if weight_at is not None:
                weight = arguments[weight_at]
                param = self._names.get(
                    id(weight.weight if isinstance(weight, Norm) else weight), "rounding"
                )
                layer, param = _split(param)
                name = f"{operation} ({param})"
            if experts_at is not None:
                layer, _ = _split(self._names[id(arguments[experts_at].router)])
            self.note(name, marks, layer)  # pyright: ignore[reportArgumentType]
            return out

        return traced


def _plain(ops: Ops, dtype: Dtype) -> Ops:
    """Return operations for single calls.

    A backend that compiles leaves products in float32 and lets the gate round them.
    """
    if ops.compile is None:
        return ops
    gate: Callable[..., Tensor] = ops.gate
    return replace(ops, gate=lambda x, activation: gate(x, activation, dtype))


def _split(param: str) -> tuple[int | None, str]:
    parts = param.split(".")
    return (int(parts[1]), parts[2]) if parts[0] == "layers" else (None, param)


def _name_layers(trace: _Trace) -> None:
    """Assign gates and norms without weights to the layer of the next operation that has one."""
    layer = None
    for index in reversed(range(len(trace.steps))):
        step = trace.steps[index]
        if step.layer is None and (step.operation == "gate" or "rounding" in step.operation):
            trace.steps[index] = step._replace(layer=layer)
        else:
            layer = step.layer


def _stored_marks(view: KVStorage, layer: int, slots: Tensor) -> Tensor:
    """Return marks of the keys and values at slots [N].

    The block table is 0, 1, 2 ..., so that slots are positions.
    """
    keys, values = view.gather(layer, slots)  # [kv heads, N, head_dim]
    return _marks(torch.cat([as_torch(keys), as_torch(values)]).transpose(0, 1))


def _marks(rows: Tensor) -> Tensor:
    """Return a number for each row that depends on all its bits: int64 [N, ...] -> [N].

    Integer sums do not depend on their order.
    """
    bits = as_torch(rows).contiguous().view(len(rows), -1)
    bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]).long()
    factors = torch.randint(
        -(2**62), 2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(bits.shape[1])
    )
    return (bits * (2 * factors + 1).to(bits.device)).sum(dim=1)

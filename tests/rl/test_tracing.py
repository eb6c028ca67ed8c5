"""`differences` names the operation that breaks invariance and its layer, and reports if no
operation does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.arrays import as_torch, of_kind
from nano_inference.ops.interface import Ops
from nano_inference.rl.comparison import Difference, differences
from nano_inference.rl.replayer import Replayer
from nano_inference.rl.tracing import (
    COMPILED,
    COMPILED_SINGLE,
    ONE_THREAD,
    SINGLE,
    WHOLE,
    Diagnosis,
    diagnose,
)
from tests.models.tiny import tiny_llama, tiny_model
from tests.ops.compiler import NEEDS_COMPILER

Break = Callable[[InferenceEngine, Ops], Ops]
PROMPT = list(range(40, 61))
PARAMS = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, raw_logprobs=True)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., InferenceEngine]]:
    threads, engines = torch.get_num_threads(), list[InferenceEngine]()

    def make(
        *, broken: Break | None = None, family: str | None = None, **options: Any
    ) -> InferenceEngine:
        folder = tiny_model(tmp_path, family) if family else tiny_llama(tmp_path)
        settled = {
            "model_path": str(folder),
            "num_threads": 2,
            "kv_cache_memory": 2**21,
            "backend": "reference",
        }
        engine = InferenceEngine(EngineConfig(**(settled | options)))
        if broken is not None:
            engine.model.ops = broken(engine, engine.model.ops)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)


def look(engine: InferenceEngine, sample: TrainingSample) -> Diagnosis:
    replayer = Replayer(engine)
    difference = differences(sample, replayer.replay(sample))
    assert difference
    return diagnose(replayer, sample, difference[0])


def splits_k_by_rows(param: str) -> Break:
    """Sum halves of K separately for one row, as a decode kernel might."""

    def broken(engine: InferenceEngine, ops: Ops) -> Ops:
        def linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            if len(x) > 1 or weight is not engine.model.params[param]:
                return ops.linear(x, weight, *rest)
            half = x.shape[1] // 2
            return functional.linear(x[:, :half], weight[:, :half]) + functional.linear(
                x[:, half:], weight[:, half:]
            )

        return replace(ops, linear=linear)

    return broken


def other_bits(rows: Tensor) -> Tensor:
    tensor = as_torch(rows)
    return of_kind(rows, tensor.nextafter(torch.tensor(1e9, dtype=tensor.dtype)))


def breaks(operation: str, layer: int | None = None) -> Break:
    """Change the last bit of an operation's result for a single row."""

    def broken(_: InferenceEngine, ops: Ops) -> Ops:
        def run(*arguments: Any) -> Any:
            out = getattr(ops, operation)(*arguments)
            layers = {"attention": 2, "rope_and_store": 5}
            if len(arguments[0]) == 1 and (layer is None or arguments[layers[operation]] == layer):
                out = other_bits(out)
            return out

        return replace(ops, **{operation: run})

    return broken


@pytest.mark.parametrize(
    ("broken", "layer", "operation"),
    [
        (splits_k_by_rows("layers.1.down"), 1, "linear (down)"),
        (splits_k_by_rows("layers.0.qkv"), 0, "linear (qkv)"),
        (breaks("attention", 0), 0, "attention"),
        (breaks("attention", 1), 1, "attention"),
        (breaks("rope_and_store", 1), 1, "rope_and_store"),
        (breaks("gate"), 0, "gate"),
        (breaks("embed"), None, "embed (embed)"),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_trace_names_the_first_differing_operation(
    build: Callable[..., InferenceEngine], broken: Break, layer: int | None, operation: str
) -> None:
    engine = build(broken=broken)
    traced = look(engine, engine.generate(PROMPT, PARAMS)[0]).operation
    assert traced is not None
    assert (traced.layer, traced.operation, traced.schedules) == (layer, operation, (WHOLE, SINGLE))
    if not operation.startswith("linear"):  # a split need not change the bits of every row
        assert traced.position == 0
    assert f"layer {layer}" in str(traced) or layer is None


def test_trace_compares_stored_keys_and_values(build: Callable[..., InferenceEngine]) -> None:
    def broken(_: InferenceEngine, ops: Ops) -> Ops:
        def rope_and_store(*arguments: Any) -> Tensor:
            q = ops.rope_and_store(*arguments)
            if len(q) == 1 and arguments[5] == 1:
                keys, values = arguments[4].gather(1, arguments[3])
                arguments[4].write(
                    1, arguments[3], other_bits(keys).transpose(0, 1), values.transpose(0, 1)
                )
            return q

        return replace(ops, rope_and_store=rope_and_store)

    engine = build(broken=broken)
    operation = look(engine, engine.generate(PROMPT, PARAMS)[0]).operation
    assert operation is not None
    assert (operation.layer, operation.operation) == (1, "rope_and_store")


def test_trace_compares_the_draw(build: Callable[..., InferenceEngine]) -> None:
    def broken(_: InferenceEngine, ops: Ops) -> Ops:
        def sample(hidden: Tensor, *arguments: Any) -> Any:
            draw = ops.sample(hidden, *arguments)
            return draw if len(hidden) > 1 else replace(draw, logprobs=other_bits(draw.logprobs))

        return replace(ops, sample=sample)

    engine = build(broken=broken)
    operation = look(engine, engine.generate(PROMPT, PARAMS)[0]).operation
    assert operation is not None
    assert (operation.layer, operation.operation) == (None, "sample")


@pytest.mark.thorough
@NEEDS_COMPILER
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trace_names_the_weights_if_every_operation_agrees(
    build: Callable[..., InferenceEngine], family: str, dtype: str
) -> None:
    engine = build(family=family, backend="cpu", dtype=dtype)
    sample = engine.generate(PROMPT, replace(PARAMS, repetition_penalty=1.2))[0]
    for field, value in (
        ("seed", 99),
        ("logprobs", (*sample.logprobs[:-1], -9.0)),
        ("weight_version", 1),
    ):
        difference = look(engine, replace(sample, **{field: value}))
        assert difference.operation is None
        assert difference.weight_version == 0
        assert len(difference.weights_sha256) == 64
        assert difference.weights_sha256 in str(difference)


@pytest.mark.thorough(cases=["1-schedules0"])
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rows", "schedules"), [(1, (COMPILED, COMPILED_SINGLE)), (32, (WHOLE, COMPILED))]
)
def test_compiled_decoder_is_compared_with_its_operations(
    build: Callable[..., InferenceEngine], rows: int, schedules: tuple[str, str]
) -> None:
    """Compiled batches of this row count are wrong."""

    def broken(_: InferenceEngine, ops: Ops) -> Ops:
        assert ops.compile is not None
        compile_trunk = ops.compile

        def compiled(*arguments: Any) -> Any:
            run = compile_trunk(*arguments)
            return lambda batch: (
                other_bits(run(batch)) if len(batch.input_ids) == rows else run(batch)
            )

        return replace(ops, compile=compiled)

    engine = build(broken=broken, backend="cpu", dtype="float32")
    sample = engine.generate(PROMPT, PARAMS)[0]
    replayer = Replayer(engine)
    assert differences(sample, replayer.replay(sample))
    last = len(sample.completion_tokens) - 1
    assert len(PROMPT) + last == 32
    operation = diagnose(replayer, sample, Difference("logprobs", last, None, None)).operation
    assert operation is not None
    assert (operation.operation, operation.schedules) == ("rms_norm (norm)", schedules)


@NEEDS_COMPILER
def test_trace_compares_thread_counts(build: Callable[..., InferenceEngine]) -> None:
    def broken(_: InferenceEngine, ops: Ops) -> Ops:
        return replace(ops, linear=lambda *given: other_bits(ops.linear(*given)))

    engine = build(backend="cpu", dtype="float32")
    sample = engine.generate(PROMPT, PARAMS)[0]
    # The engine's single operations are wrong in the same way under every schedule, and the decoder
    # is not compiled.
    engine.model.ops = replace(broken(engine, engine.model.ops), compile=None)
    operation = look(engine, sample).operation
    assert operation is not None
    assert (operation.layer, operation.operation, operation.schedules) == (
        0,
        "linear (qkv)",
        (WHOLE, ONE_THREAD),
    )

"""Recorded programs: same bits as single operations, disjoint buffers, and rejected invalid
batches.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.checkpoints.loading import load_params, load_spec
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.library import load
from nano_inference.ops.cpu.operations import Buffer, Operation, place_buffers
from nano_inference.ops.cpu.program import Program
from nano_inference.ops.cpu.recorder import Recorder
from nano_inference.ops.interface import Ops
from tests.depth import at_depth
from tests.models.tiny import FAMILIES, tiny_model
from tests.ops.compiler import NEEDS_COMPILER

BLOCK_SIZE, NUM_BLOCKS, VOCAB = 8, 64, 300
Chunks = list[tuple[int, int, int]]  # sequence, start, end

# Prefill, chunks of all lengths next to decodes, decodes only. Enough rows that threads can split
# both rows and sequences.
STEPS: list[Chunks] = [
    [(0, 0, 5), (1, 0, 40), (2, 0, 1)],
    [(0, 5, 6), (1, 40, 41), (2, 1, 2)],
    [(3, 0, 70)],
    [(0, 6, 50), (1, 41, 80), (2, 2, 3)],
    [(3, 70, 71)],
    [(0, 50, 95), (1, 80, 120), (2, 3, 48)],
]


def tables() -> Tensor:
    """Return shuffled block tables of four sequences."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))
    return order.view(4, -1)


def batch_of(chunks: Chunks) -> ForwardBatch:
    blocks = tables().tolist()
    rows = [
        Rows(
            [(position * 37 + 11 * seq) % VOCAB for position in range(start, end)],
            start,
            blocks[seq],
        )
        for seq, start, end in chunks
    ]
    return batch_of_rows(rows, BLOCK_SIZE)


def decoder(folder: Path, dtype: torch.dtype, num_threads: int = 2) -> Decoder:
    ops, spec = cpu_ops(num_threads), load_spec(folder)
    return Decoder(
        spec, load_params(folder, spec, dtype, torch.device("cpu"), ops.allocate), ops, 200
    )


def storage_of(model: Decoder) -> KVStorage:
    """Return a KV cache full of NaN."""
    storage = KVStorage(model.spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, torch.device("cpu"))
    storage.keys.fill_(torch.nan)
    storage.values.fill_(torch.nan)
    return storage


def one_by_one(ops: Ops, dtype: torch.dtype) -> Ops:
    """Run the operations on tensors as a trunk does: product sums are float32, and the gate rounds
    them.
    """
    gate: Callable[..., Tensor] = ops.gate
    return replace(ops, gate=lambda x, activation: gate(x, activation, dtype), compile=None)


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.thorough(but=["llama-bias-torch.bfloat16"])
@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek-v3", "gemma4"])
def test_program_gives_the_bits_of_its_operations(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = decoder(tiny_model(tmp_path, family), dtype)
    assert model.ops.compile is not None
    recorded, plain = storage_of(model), storage_of(model)
    ops = one_by_one(model.ops, dtype)
    program: Any = None
    for chunks in STEPS:
        batch = batch_of(chunks)
        if program is None:
            program = model.ops.compile(model.trunk, batch, recorded, dtype)
        expected = model.trunk(ops, batch, plain)
        assert not expected.isnan().any()
        assert torch.equal(program(batch), expected)
        for got, other in ((recorded.keys, plain.keys), (recorded.values, plain.values)):
            assert torch.equal(got.view(torch.uint8), other.view(torch.uint8))
    # The gate and additions are fused into their products, except across a norm between a product
    # and its addition. Experts are one operation, and the next norm adds their sum. An activation
    # without a gate is a call. Latents add six operations before the attention and two after it. A
    # layer's own input adds five operations, its scale two.
    spec = model.spec
    of_a_layer = (8 if spec.norms == "pre" else 10) + (not spec.gated)
    of_a_layer += 8 * (spec.latent is not None)
    of_a_layer += 5 * (spec.layer_inputs > 0) + 2 * spec.layer_scales
    before = 2 + spec.embed_norm + 4 * (spec.layer_inputs > 0)
    of_experts = 0 if spec.moe is None else sum(spec.moe.layers)
    assert len(program.operations) == before + of_a_layer * spec.num_layers - of_experts


@pytest.mark.thorough
@NEEDS_COMPILER
def test_program_sees_new_weights(tmp_path: Path) -> None:
    """Weights are written in place, and a program holds no copies."""
    model, other = (
        decoder(tiny_model(tmp_path / str(i), "llama-bias", seed=i), torch.bfloat16) for i in (1, 2)
    )
    batch = batch_of(STEPS[0])
    storages = storage_of(model), storage_of(other)
    before = model.forward(with_logits(batch), storages[0]).hidden
    expected = other.forward(with_logits(batch), storages[1]).hidden
    assert not torch.equal(before, expected)
    for name, param in other.params.items():
        engine_param = model.params[name]
        engine_param.copy_(param) if isinstance(engine_param, Tensor) else engine_param.write(
            0, param.read()
        )
    assert torch.equal(model.forward(with_logits(batch), storages[0]).hidden, expected)


def with_logits(batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, logits_indices=batch.cu_seqlens_q[1:] - 1)


# -- memory ----------------------------------------------------------------------------------------


@st.composite
def programs(draw: Any) -> tuple[list[Operation], list[Buffer], list[Buffer]]:
    """Draw operations that read earlier results, with inputs and requested outputs."""
    buffers = [
        Buffer(i, draw(st.sampled_from([16, 32])), torch.float32)
        for i in range(draw(st.integers(1, 3)))
    ]
    inputs, written = list(buffers), list(buffers)
    operations: list[Operation] = []
    for _ in range(draw(st.integers(1, 25))):
        chosen = draw(st.lists(st.sampled_from(written), max_size=2, unique=True))
        in_place = draw(st.booleans())
        residual = draw(st.one_of(st.none(), st.sampled_from(written)))
        if residual in chosen:
            residual = None
        if in_place and residual is not None:
            output = residual  # an addition to the residual stream
        else:
            dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
            output = Buffer(len(buffers), draw(st.sampled_from([16, 32])), dtype)
            buffers.append(output)
            written.append(output)
        operations.append(Operation(0, tuple(chosen), output, residual))
    made = [buffer for buffer in written if buffer not in inputs]
    outputs = draw(st.lists(st.sampled_from(made), max_size=3, unique=True)) if made else []
    return operations, inputs, outputs


@pytest.mark.thorough
@settings(max_examples=at_depth(300), deadline=None)
@given(programs())
def test_buffer_is_kept_until_its_last_reader(
    program: tuple[list[Operation], list[Buffer], list[Buffer]],
) -> None:
    operations, inputs, outputs = program
    places, sizes = place_buffers(operations, (*inputs, *outputs))
    # memory slot -> the buffer whose contents it holds
    memory: dict[int, int] = {places[buffer.index]: buffer.index for buffer in inputs}
    for operation in operations:
        read = [*operation.inputs, *([operation.residual] if operation.residual else [])]
        for buffer in read:
            assert memory[places[buffer.index]] == buffer.index
        if operation.output not in read:
            assert places[operation.output.index] not in [places[buffer.index] for buffer in read]
        memory[places[operation.output.index]] = operation.output.index
    for buffer in (*inputs, *outputs):
        assert memory[places[buffer.index]] == buffer.index
    used = {*inputs, *outputs, *(b for o in operations for b in (*o.inputs, o.output))}
    assert all(sizes[places[buffer.index]] == buffer.row_bytes for buffer in used)


@pytest.mark.thorough
@NEEDS_COMPILER
def test_deep_model_needs_no_more_memory_than_a_shallow_one(tmp_path: Path) -> None:
    pieces: set[int] = set()
    for layers in (2, 6):
        model = decoder(
            tiny_model(tmp_path / str(layers), "llama", num_hidden_layers=layers), torch.bfloat16
        )
        pieces.add(len(replay(model, storage_of(model))._sizes))
    assert len(pieces) == 1


# -- invalid batches -------------------------------------------------------------------------------


def replay(model: Decoder, storage: KVStorage) -> Program:
    assert model.ops.compile is not None
    batch = batch_of(STEPS[0])
    return model.ops.compile(model.trunk, batch, storage, model.dtype)  # pyright: ignore[reportReturnType]


def put(name: str, index: Any, value: int) -> Callable[[ForwardBatch], ForwardBatch]:
    """Return a batch with one number changed."""

    def spoil(batch: ForwardBatch) -> ForwardBatch:
        tensor = getattr(batch, name).clone()
        tensor[index] = value
        return replace(batch, **{name: tensor})

    return spoil


def shape(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[ForwardBatch], ForwardBatch]:
    """Return a batch with one tensor replaced."""
    return lambda batch: replace(batch, **{name: change(getattr(batch, name))})


def spread(tensor: Tensor) -> Tensor:
    """Return the same numbers, not contiguous."""
    return torch.stack([tensor, tensor], -1)[..., 0]


ROWS = ("input_ids", "positions", "slot_mapping", "row_chunks", "cu_seqlens_q", "seq_lens")
SPOILED: dict[str, tuple[Callable[[ForwardBatch], ForwardBatch], str]] = {
    "token beyond": (put("input_ids", -1, VOCAB), "vocabulary"),
    "token negative": (put("input_ids", 3, -1), "vocabulary"),
    "slot beyond": (put("slot_mapping", 7, NUM_BLOCKS * BLOCK_SIZE), "slot"),
    "slot negative": (put("slot_mapping", 0, -1), "slot"),
    "block beyond": (put("block_tables", (1, 4), NUM_BLOCKS), "block table"),
    "block negative": (put("block_tables", (0, 0), -5), "block table"),
    "position beyond": (put("positions", -1, 200), "position"),
    "position negative": (put("positions", 0, -1), "position"),
    "position elsewhere": (put("positions", 20, 150), "do not fit"),
    "first position elsewhere": (put("positions", 5, 3), "do not fit"),
    "chunk without rows": (put("cu_seqlens_q", 1, 0), "do not fit"),
    "chunk of negative rows": (put("cu_seqlens_q", 1, 46), "do not fit"),
    "chunk far beyond": (
        put("cu_seqlens_q", slice(1, 3), torch.tensor([2**40, 2**40 + 1])),
        "do not fit",
    ),  # type: ignore[arg-type]
    "rows behind the last chunk": (put("cu_seqlens_q", -1, 45), "do not fit"),
    "rows before the first chunk": (put("cu_seqlens_q", 0, 1), "do not fit"),
    "context shorter than its chunk": (put("seq_lens", 1, 39), "do not fit"),
    "context beyond its table": (put("seq_lens", 1, 10_000), "do not fit"),
    "chunk index beyond": (put("row_chunks", 8, 3), "do not fit"),
    "chunk index negative": (put("row_chunks", 0, -1), "do not fit"),
    "table too narrow": (shape("block_tables", lambda t: t[:, :4].contiguous()), "do not fit"),
    "table not contiguous": (shape("block_tables", spread), "contiguous"),
    "table of int32": (shape("block_tables", lambda t: t.int()), "int64"),
    "table of too few chunks": (shape("block_tables", lambda t: t[:-1].contiguous()), "cu_seqlens"),
    **{f"{name} of int32": (shape(name, lambda t: t.int()), "int64") for name in ROWS},
    **{f"{name} not contiguous": (shape(name, spread), "contiguous") for name in ROWS},
    **{f"{name} too short": (shape(name, lambda t: t[:-1].clone()), "numbers") for name in ROWS},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("tiny"), "llama"), torch.float32)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", SPOILED)
def test_invalid_batch_is_rejected_before_any_write(model: Decoder, name: str) -> None:
    storage = storage_of(model)
    program = replay(model, storage)
    spoil, why = SPOILED[name]
    with pytest.raises(ValueError, match=why):
        program(spoil(batch_of(STEPS[0])))
    assert storage.keys.isnan().all()
    assert storage.values.isnan().all()
    assert not program(batch_of(STEPS[0])).isnan().any(), "the next run failed"


@pytest.mark.thorough
@NEEDS_COMPILER
@settings(max_examples=at_depth(150), deadline=None)
@given(st.data())
def test_arbitrary_batch_runs_or_is_rejected(model: Decoder, data: Any) -> None:
    """For any numbers in a batch, the program runs or rejects them."""
    storage = storage_of(model)
    batch = batch_of(data.draw(st.sampled_from(STEPS)))
    names = [f.name for f in fields(batch) if f.name in (*ROWS, "block_tables")]
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        tensor = getattr(batch, name).clone()
        index = data.draw(st.integers(0, tensor.numel() - 1))
        tensor.view(-1)[index] += data.draw(
            st.sampled_from([-(2**62), -1000, -1, 1, 7, 1000, 2**33, 2**62])
        )
        batch = replace(batch, **{name: tensor})
    before = storage.keys.clone()
    try:
        replay(model, storage)(batch)
    except ValueError:
        assert torch.equal(storage.keys.view(torch.uint8), before.view(torch.uint8))


@NEEDS_COMPILER
def test_empty_batch_returns_zero_rows(model: Decoder) -> None:
    batch = batch_of(STEPS[0])
    empty = {
        name: getattr(batch, name)[:0]
        for name in ("input_ids", "positions", "slot_mapping", "row_chunks")
    }
    assert len(replay(model, storage_of(model))(replace(batch, **empty))) == 0


@NEEDS_COMPILER
def test_storage_of_another_kind_is_rejected(tmp_path: Path, model: Decoder) -> None:
    other = decoder(tiny_model(tmp_path, "llama", num_key_value_heads=1), torch.float32)
    with pytest.raises(ValueError, match="KV storage"):
        replay(model, storage_of(other))
    half = KVStorage(model.spec, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match="KV storage"):
        replay(model, half)


@NEEDS_COMPILER
@pytest.mark.parametrize("num_threads", [1, 2])
def test_operation_of_unknown_kind_is_reported(num_threads: int) -> None:
    recorder = Recorder(torch.float32)
    x, out = (recorder.new(16, torch.float32) for _ in range(2))
    recorder.operations.append(Operation(99, (x,), out))
    program = Program(recorder, (x,), (out,), None, num_threads, load())
    with pytest.raises(NotImplementedError, match="no kernel for an operation of this program"):
        program.run(3, [torch.ones((3, 16))])

"""FlashInfer's place in the engine, with a stand-in for the package: how it is planned, what it is
given to read.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.core.batch import ForwardBatch, Rows, batch_of_rows
from nano_inference.device.backends import captures_graphs
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.errors import ConfigError
from nano_inference.ops.flashinfer import FlashInferAttention
from nano_inference.ops.interface import AttentionArgs
from nano_inference.ops.reference import attention as reference_attention
from tests.depth import at_depth
from tests.models.tiny import tiny_model
from tests.ops import flashinfer_stand_in

CALM = settings(
    deadline=None,
    max_examples=at_depth(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
HEADS, KV_HEADS, D, NUM_BLOCKS = 4, 2, 8, 40


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    monkeypatch.setattr("nano_inference.ops.flashinfer._WORKSPACE", 16)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def cache(batch: ForwardBatch, block_size: int, seed: int) -> KVStorage:
    """Two layers of NaN but for the contexts of the batch."""
    spec = SimpleNamespace(
        num_layers=2,
        num_kv_heads=KV_HEADS,
        head_dim=D,
        windows=(0, 0),
        state=None,
        kv_tensors=2,
        kinds=(),
    )
    storage = KVStorage(spec, NUM_BLOCKS, block_size, torch.float16, torch.device("cpu"))
    for i, tensor in enumerate((storage.keys, storage.values)):
        tensor.fill_(torch.nan)
        for table, length in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
            slots = torch.arange(length)
            slots = table[slots // block_size] * block_size + slots % block_size
            tensor.flatten(2, 3)[:, :, slots] = randn(2, KV_HEADS, length, D, seed=seed + i)
    return storage


def drawn_batch(data: st.DataObject, block_size: int) -> ForwardBatch:
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    chunks = []
    for start, length in data.draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=4)
    ):
        count = -(-(start + length) // block_size)
        chunks.append(Rows([0] * length, start, [blocks.pop() for _ in range(count)]))
    return batch_of_rows(chunks, block_size)


@pytest.mark.thorough
@CALM
@given(
    block_size=st.sampled_from([3, 4, 16]),
    window=st.sampled_from([0, 1, 5]),
    layer=st.integers(0, 1),
    data=st.data(),
)
def test_it_agrees_with_the_reference(
    block_size: int, window: int, layer: int, data: st.DataObject
) -> None:
    batch = drawn_batch(data, block_size)
    view, q = cache(batch, block_size, 3), randn(len(batch.input_ids), HEADS, D, seed=9)
    ours = FlashInferAttention()
    found = ours.attend(q, view, layer, ours.plan(batch, block_size, window), 0.3)
    plan = reference_attention.plan_attention(batch, block_size, window)
    expected = reference_attention.attention(q, view, layer, plan, AttentionArgs(0.3))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@CALM
@given(padding=st.integers(1, 3), data=st.data())
def test_padding_and_tables_of_another_stride(padding: int, data: st.DataObject) -> None:
    """As a step's buffers have it: chunks without rows, rows without chunks, tables whose stride
    the device knows.
    """
    batch = drawn_batch(data, 4)
    view, q = cache(batch, 4, 3), randn(len(batch.input_ids) + padding, HEADS, D, seed=9)
    ours, rows = FlashInferAttention(), len(batch.input_ids)
    expected = ours.attend(q[:rows], view, 0, ours.plan(batch, 4), 0.3)
    tables = torch.zeros(len(batch.seq_lens) + padding, NUM_BLOCKS + 3, dtype=torch.int64)
    width = batch.block_tables.shape[1]
    tables.view(-1)[: batch.block_tables.numel()] = batch.block_tables.flatten()
    padded = replace(
        batch,
        block_tables=tables,
        table_stride=torch.tensor([width]),
        cu_seqlens_q=torch.cat((batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].repeat(padding))),
        seq_lens=torch.cat((batch.seq_lens, torch.zeros(padding, dtype=torch.int64))),
    )
    found = ours.attend(q, view, 0, ours.plan(padded, 4), 0.3)
    assert torch.equal(found[:rows], expected)
    assert not found[rows:].any()


def test_a_step_is_planned_once_for_each_window_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setattr(wrapper, "planned", 0)
    batch = batch_of_rows([Rows([0] * 5, 3, [2, 0])], 4)
    view, q, ours = cache(batch, 4, 1), randn(5, HEADS, D, seed=2), FlashInferAttention()
    plans = [ours.plan(batch, 4, window) for window in (0, 3)]
    for layer in (0, 1, 0):
        for plan in plans:
            ours.attend(q, view, layer, plan, 0.3)
    assert wrapper.planned == 2
    first = ours.attend(q, view, 0, plans[0], 0.3)
    other = ours.plan(batch_of_rows([Rows([0], 4, [2, 0])], 4), 4)
    ours.attend(q[:1], view, 0, other, 0.3)
    assert torch.equal(ours.attend(q, view, 0, plans[0], 0.3), first), (
        "another batch's plan was run"
    )
    assert wrapper.planned == 4


def test_a_batch_of_padding_alone() -> None:
    batch = batch_of_rows([Rows([0], 0, [1])], 4)
    view, ours = cache(batch, 4, 1), FlashInferAttention()
    none = replace(
        batch,
        cu_seqlens_q=torch.zeros(2, dtype=torch.int64),
        seq_lens=torch.zeros(1, dtype=torch.int64),
    )
    assert not ours.attend(randn(1, HEADS, D, seed=1), view, 0, ours.plan(none, 4), 0.3).any()


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of_rows([Rows([0], 0, [1])], 4)
    view, ours = cache(batch, 4, 1), FlashInferAttention()
    with pytest.raises(ValueError, match=r"not in torch\.float32"):
        ours.attend(torch.zeros(1, HEADS, D), view, 0, ours.plan(batch, 4), 0.3)
    view.unit_map = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="whole blocks"):
        ours.attend(torch.zeros(1, HEADS, D).half(), view, 0, ours.plan(batch, 4), 0.3)
    assert captures_graphs(EngineConfig(model_path="m"))
    assert not captures_graphs(EngineConfig(model_path="m", attention="flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        FlashInferAttention()


@pytest.mark.thorough
def test_an_engine_with_windows_keeps_whole_blocks_triton(tmp_path: Path) -> None:
    """Gemma's layers with and without a window take turns; the other kernels run in Triton's
    interpreter.
    """
    pytest.importorskip("triton")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    layers = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size": 300,
    }
    options = {
        "model_path": str(tiny_model(tmp_path, "gemma3", **sizes, **layers)),
        "dtype": "float16",
    }
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    results = []
    for own in ({"backend": "cuda", "attention": "flashinfer"}, {"backend": "reference"}):
        config = EngineConfig(**options, **own, device="cpu", kv_cache_memory=2**20)
        with InferenceEngine(config) as engine:
            results.append(engine.generate([[(11 * i) % 290 + 3 for i in range(40)]], params)[0])
            assert ("flashinfer" in engine.numerics.fingerprint) == ("attention" in own)
    assert results[0].completion_tokens == results[1].completion_tokens
    assert results[0].logprobs == pytest.approx(results[1].logprobs, abs=0.02)

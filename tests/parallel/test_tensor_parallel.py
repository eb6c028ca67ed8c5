"""1, 2, 4 and 8 ranks that shard a model's layers: the same bits in hidden rows, samples and
scores.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.checkpoints.gguf.file import describe_gguf
from nano_inference.checkpoints.loading import load_params, load_spec
from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.models.decoder import Decoder
from nano_inference.models.sharding.rank_exchange import RankExchange
from nano_inference.models.sharding.shard import shard_of
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.interface import Ops
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.parallel.mesh import Mesh, Place
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, sampling_batch
from tests.checkpoints.hf_to_gguf import hf_to_gguf
from tests.checkpoints.quantisers import write_quantised
from tests.invariance.scenario import spoil
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import family_weights, llama_config, tiny_model
from tests.ops.compiler import NEEDS_COMPILER
from tests.parallel.thread_group import ThreadGroup

T = TypeVar("T")
BLOCK_SIZE, NUM_BLOCKS = 8, 12
CPU = torch.device("cpu")
# (sequence, start, end) of each step: prompt chunks, then a decode next to a chunk
STEPS = [[(0, 0, 19), (1, 0, 5)], [(0, 19, 20), (1, 5, 40)]]
WIDE = {
    "vocab_size": 3100,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
}
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 144}
FEW_KV = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}


class Found(NamedTuple):
    """Results of all steps on one rank."""

    hidden: Tensor
    scores: Tensor
    draws: list[Draw]


def on_ranks(size: int, run: Callable[[int], T]) -> list[T]:
    """Return each rank's result. An exception of one rank is raised; the others end at the group's
    deadline.
    """
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]


def decoders(
    folder: Path, ops: Ops, dtype: torch.dtype, ranks: int, quantization: str | None = None
) -> list[Decoder]:
    spec, groups = load_spec(folder), ThreadGroup.make(ranks, patience=20)
    made: list[Decoder] = []
    for rank in range(ranks):
        part = shard_of(spec, Place(Mesh(tensor=ranks), rank))
        rank_exchange = RankExchange(part, tensor=groups[rank] if ranks > 1 else None)
        params = load_params(folder, spec, dtype, CPU, ops.allocate, part, quantization)
        made.append(Decoder(part.spec, params, ops, 64, rank_exchange))
    return made


def batches(vocab: int) -> list[ForwardBatch]:
    made: list[ForwardBatch] = []
    for chunks in STEPS:
        rows = [
            Rows(
                [(7 + 37 * at + 1009 * seq) % vocab for at in range(start, end)],
                start,
                [*range(6 * seq, 6 * seq + 6)],
            )
            for seq, start, end in chunks
        ]
        batch = batch_of_rows(rows, BLOCK_SIZE)
        scored = torch.tensor([0, 2, 5])
        made.append(
            replace(
                batch,
                logits_indices=batch.cu_seqlens_q[1:] - 1,
                score_rows=scored,
                score_targets=torch.tensor([3, vocab - 1, vocab // 2]),
                score_temperatures=torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
            )
        )
    return made


def requests(kind: str, vocab: int) -> list[DrawRequest]:
    plain = [
        SamplingParams(temperature=0),
        SamplingParams(raw_logprobs=True),
        SamplingParams(
            temperature=0.7, logit_bias={1: 2.0, vocab - 1: 3.0}, repetition_penalty=1.3
        ),
        SamplingParams(temperature=1.3, allowed_token_ids=frozenset({2, vocab // 2, vocab - 2})),
    ]
    cut = [
        SamplingParams(top_k=5, temperature=0.9),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.1),
    ]
    params = {"plain": plain, "mixed": plain + cut}[kind]
    return [
        DrawRequest(each, i % 2, (11, i, 40 + i), [3, vocab - 1], [vocab // 2])
        for i, each in enumerate(params * 2)
    ]


@torch.inference_mode()
def run(model: Decoder, kept: KVCacheDType = "auto") -> Found:
    storage = KVStorage(model.spec, NUM_BLOCKS, BLOCK_SIZE, model.dtype, CPU, kv_cache_dtype=kept)
    spoil(storage, slice(None))
    hidden: list[Tensor] = []
    scores: list[Tensor] = []
    draws: list[Draw] = []
    vocab = model.part.whole.vocab_size
    for batch in batches(vocab):
        result = model.forward(batch, storage)
        hidden.append(result.hidden.clone())
        scores.append(result.scores)
        for kind in ("plain", "mixed"):
            asked = sampling_batch(requests(kind, vocab))
            draws += [
                model.draw(result.hidden, asked),
                model.draw(result.hidden, replace(asked, most_top=4)),
            ]
    return Found(torch.cat(hidden), torch.cat(scores), draws)


def require_same(one: Any, other: Any) -> None:
    """Check bitwise equality, including signs of zeros. NaN equals NaN."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        plain = [
            each.nan_to_num(9e9) if each.is_floating_point() else each for each in (one, other)
        ]
        assert torch.equal(*plain)
        assert torch.equal(*(each.signbit() for each in plain))
    elif isinstance(one, Draw):
        for name in one.__slots__:
            require_same(getattr(one, name), getattr(other, name))
    elif one is None:
        assert other is None
    else:
        for mine, yours in zip(one, other, strict=True):
            require_same(mine, yours)


def check(
    folder: Path,
    ops: Ops,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    quantization: str | None = None,
    kept: KVCacheDType = "auto",
) -> None:
    alone = run(decoders(folder, ops, dtype, 1, quantization)[0], kept)
    assert not alone.hidden.isnan().any()
    for ranks in sizes:
        models = decoders(folder, ops, dtype, ranks, quantization)
        for outputs in on_ranks(ranks, lambda rank: run(models[rank], kept)):  # noqa: B023 (called at once)
            require_same(outputs, alone)


@pytest.mark.thorough(cases=["wide"])
@pytest.mark.parametrize(
    ("family", "changes", "sizes"),
    [
        ("llama", WIDE, (2, 4, 8)),
        ("llama", NINE, (2, 4)),
        ("llama-bias", FEW_KV, (2, 8)),
        ("gemma3", {"num_attention_heads": 2}, (2,)),
        ("qwen3-moe", {}, (2, 4)),
        ("phi3", {"intermediate_size": 50}, (2, 4)),
    ],
    ids=["wide", "nine-heads", "one-kv-head", "gemma3", "experts", "fused"],
)
def test_tensor_ranks_agree_bit_for_bit(
    tmp_path: Path, family: str, changes: Any, sizes: tuple[int, ...]
) -> None:
    check(tiny_model(tmp_path, family, **changes), reference_ops(), torch.float32, sizes)


@pytest.mark.parametrize("ops", [reference_ops, partial(cpu_ops, 1)], ids=["reference", "cpu"])
def test_expert_sinks_and_biases_are_sharded(tmp_path: Path, ops: Any) -> None:
    case = CASES["gpt-oss"]
    strong_model(tmp_path, case.class_name, **case.config)
    check(tmp_path, ops(), torch.float32, (2, 4))


@pytest.mark.thorough(cases=["experts-reference"])
@pytest.mark.parametrize("ops", [reference_ops, partial(cpu_ops, 1)], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("quantization", "family", "changes"),
    [
        ("int8", "llama", {**WIDE, "intermediate_size": 256}),
        ("int8-32", "llama", {**WIDE, "head_dim": 32, "intermediate_size": 288}),
        ("int4", "llama-bias", {**FEW_KV, "head_dim": 32, "intermediate_size": 256}),
        ("int4", "qwen3-moe", {"head_dim": 32, "num_hidden_layers": 2, "mlp_only_layers": []}),
    ],
    ids=["int8", "int8-32", "int4", "experts"],
)
def test_ranks_with_sharded_codes_agree_bit_for_bit(
    tmp_path: Path, quantization: str, family: str, changes: Any, ops: Any
) -> None:
    folder = tiny_model(tmp_path, family, **changes)
    check(folder, ops(), torch.bfloat16, (2, 4), quantization)


@pytest.mark.parametrize("ops", [reference_ops, partial(cpu_ops, 1)], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", ["compressed-int8", "compressed-int4", "awq"])
def test_ranks_with_sharded_file_codes_agree_bit_for_bit(
    tmp_path: Path, name: str, ops: Any
) -> None:
    config = llama_config() | {**WIDE, "head_dim": 32, "intermediate_size": 256}
    write_quantised(tmp_path, name, config, family_weights(config))
    check(tmp_path, ops(), torch.bfloat16, (2, 4), "file")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "IQ4_NL", "MXFP4"])
def test_ranks_shard_the_blocks_of_a_gguf_file(tmp_path: Path, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    sizes = {**WIDE, "head_dim": 32, "intermediate_size": 256}
    plain = tiny_model(tmp_path / "hf", "llama", **sizes)
    path = hf_to_gguf(plain, tmp_path / "m.gguf", "llama", matrices=kind)
    folder = describe_gguf(path, tmp_path / "cache", tokenizer_writer=lambda *_: None, coded=True)
    check(folder, reference_ops(), torch.bfloat16, (2, 4), "file")


@pytest.mark.parametrize("ops", [reference_ops, partial(cpu_ops, 1)], ids=["reference", "cpu"])
def test_head_is_rounded_separately(tmp_path: Path, ops: Any) -> None:
    """Keys and values are quantized, and each rank has some of the heads."""
    folder = tiny_model(tmp_path, "llama", **WIDE)
    check(folder, ops(), torch.bfloat16, (2, 4), kept="int8")


@pytest.mark.thorough
def test_ranks_agree_in_bfloat16(tmp_path: Path) -> None:
    check(tiny_model(tmp_path, "llama", **WIDE), reference_ops(), torch.bfloat16, (2, 8))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "changes", "sizes"),
    [
        ("llama", WIDE, (2, 4, 8)),
        ("llama", NINE, (2, 4)),
        ("llama-bias", FEW_KV, (8,)),
        ("granite", {}, (4,)),
        ("mixtral", {}, (2, 4)),
    ],
    ids=["wide", "nine-heads", "one-kv-head", "granite", "experts"],
)
def test_kernels_agree_bit_for_bit(
    tmp_path: Path, family: str, changes: Any, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    check(tiny_model(tmp_path, family, **changes), cpu_ops(1), dtype, sizes)

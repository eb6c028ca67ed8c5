"""The law at the widths of real models, operation by operation: a row has the same bits in any
batch.

Tiny models (`test_gpu_invariance.py`) have one product segment and one key split unless their tiles
are made small. The sizes here are those of production: tiles of few and of many rows, segments in
separate programs, and splits that are merged in registers and in memory.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference import SamplingParams
from nano_inference.config import KVCacheDType
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.device.queues import queue_of
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.cuda import sampling
from nano_inference.ops.cuda.attention import Attention
from nano_inference.ops.cuda.backend import CudaOps
from nano_inference.ops.cuda.lora import GroupedLora
from nano_inference.ops.cuda.matmul import invariant_product
from nano_inference.ops.interface import AttentionArgs
from nano_inference.ops.lora import Adapter
from nano_inference.sampling.sample import Draw
from nano_inference.sampling.tensors import DrawRequest, SamplingBatch, sampling_batch, to_device
from tests.gpu.latents import LATENT, TOY_LATENT, Latents
from tests.gpu.target import STATES, TEXTS, TOY_STATES, Target, adapted, adapter, moved, numbers
from tests.invariance.scenario import small_tiles
from tests.ops.state_cases import Texts, computed

pytestmark = pytest.mark.gpu

BLOCK = 16
# columns of the result, columns of x: qkv, o, gate and up, down
WEIGHTS = {
    "0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "8b": ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)),
    "head": ((151_936, 1024),),
}
# query heads, KV heads, numbers per head, and those of a key that belong to no value
HEADS = {
    "0.6b": (16, 8, 128, 0),
    "8b": (32, 8, 128, 0),
    "gemma3-270m": (4, 1, 256, 0),
    "gemma4-31b": (32, 4, 512, 0),
    "deepseek-v3": (128, 1, 576, 64),
    "20 heads of latents": (20, 1, 576, 64),
}
TOY_HEADS = {"0.6b": (4, 2, 16, 0), "deepseek-v3": (4, 1, 48, 16)}
CONTEXTS = (1, 2, 16, 63, 64, 255, 256, 257, 1000, 4096, 32_768)
ROWS = 70  # rows at the end of each context
CHUNKS = (1, 7, 33)


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest, target: Target) -> torch.dtype:
    if target.dry and request.param == "bfloat16":
        pytest.skip("the interpreter multiplies matrices of bfloat16 wrongly")
    return getattr(torch, request.param)


@pytest.fixture(autouse=True)
def tiles(target: Target) -> Iterator[None]:
    """Use small tiles in a dry run, so that a few numbers span several."""
    if not target.dry:
        yield
        return
    with small_tiles():
        yield


@pytest.mark.parametrize("model", WEIGHTS)
def test_product_row_is_bitwise_independent_of_its_batch(
    target: Target, dtype: torch.dtype, model: str
) -> None:
    if target.dry and model != "0.6b":
        pytest.skip("a dry run has one shape")
    most, few = target.size(1024, 70), target.size(300, 66)
    counts = (1, 2, 64, 65, 300) if model == "head" else range(1, few + 1, target.size(1, 16))
    for columns, depth in ((40, 96),) if target.dry else WEIGHTS[model]:
        weight = numbers(1, columns, depth, device=target.device, dtype=dtype, scale=0.05)
        bias = numbers(2, columns, device=target.device, dtype=dtype)
        x = numbers(3, most, depth, device=target.device, dtype=dtype)
        for own_bias, result in ((None, torch.float32), (bias, dtype)):
            whole = invariant_product(x, weight, own_bias, result)
            for rows in counts:
                first = (7 * rows) % (most - rows)
                part = slice(first, first + rows)
                product = invariant_product(x[part], weight, own_bias, result)
                assert torch.equal(product, whole[part]), f"{rows} rows of [{columns}, {depth}]"


@pytest.mark.parametrize("model", ["0.6b", "8b"])
def test_adapter_row_is_bitwise_independent_of_its_batch(
    target: Target, dtype: torch.dtype, model: str
) -> None:
    if target.dry and model != "0.6b":
        pytest.skip("a dry run has one shape")
    most = target.size(600, 50)
    for columns, depth in ((40, 96),) if target.dry else WEIGHTS[model]:
        adapters = tuple(
            adapter(target.device, rank, depth, (columns // 2, columns // 2))
            for rank in (8, 16, 64)
        )
        adapter_of = [(5 * row) % 4 - 1 for row in range(most)]
        x = numbers(3, most, depth, device=target.device, dtype=dtype)
        y = numbers(4, most, columns, device=target.device, dtype=dtype)

        def added(
            rows: list[int],
            names: tuple[Adapter, ...] = adapters,
            of: list[int] = adapter_of,
            x: Tensor = x,
            y: Tensor = y,
        ) -> Tensor:
            batch = adapted(names, [of[row] for row in rows], target.device)
            return GroupedLora().lora(y[rows], x[rows], "weight", batch)

        whole = added(list(range(most)))
        lonely = [row for row, index in enumerate(adapter_of) if index < 0]
        assert torch.equal(whole[lonely], y[lonely]), "rows without an adapter"
        for rows in (1, 2, 16, 17, target.size(256, 30), target.size(257, 40)):
            some = [(7 * row) % most for row in range(rows)]
            assert torch.equal(added(some), whole[some]), f"{rows} rows of [{columns}, {depth}]"
        for index in range(3):
            members = [row for row in range(most) if adapter_of[row] == index]
            alone = added(members, (adapters[index],), [0] * most)
            assert torch.equal(alone, whole[members]), f"one adapter of [{columns}, {depth}]"


@pytest.mark.parametrize("name", STATES)
def test_state_row_is_bitwise_independent_of_its_batch(
    target: Target, dtype: torch.dtype, name: str
) -> None:
    """Compare chunks that end anywhere in a block, and decodes next to a prompt."""
    spec, texts = (TOY_STATES if target.dry else STATES)[name], TEXTS
    if target.dry:
        texts = Texts()
    texts = texts._replace(device=target.device)
    ops, longest = CudaOps(batch_invariant=True), texts.lengths[0]
    whole, kept = computed(spec, dtype, ops, texts=texts)
    decodes = tuple(range(longest - texts.lengths[-1], longest))
    for cuts in ((17, 40), tuple(range(7, longest, 13)), decodes):
        inside = tuple(tuple(cut for cut in cuts if cut < length) for length in texts.lengths)
        got, memory = computed(spec, dtype, ops, inside, texts)
        pairs = zip([*got, *memory], [*whole, *kept], strict=True)
        assert all(torch.equal(*pair) for pair in pairs), f"chunks from {cuts[:3]} on"


class Context:
    """Keys and values of sequences of several lengths, and queries of their last rows."""

    def __init__(
        self,
        target: Target,
        dtype: torch.dtype,
        heads: tuple[int, int, int, int],
        kept: KVCacheDType = "auto",
    ) -> None:
        num_heads, kv_heads, width, unread = heads
        spec: Any = SimpleNamespace(
            num_layers=1,
            num_kv_heads=kv_heads,
            head_dim=width,
            windows=(0,),
            state=None,
            kv_tensors=1 if unread else 2,
            kinds=(),
        )
        self.device, self.scores = target.device, AttentionArgs(width**-0.5, unread=unread)
        self.contexts = (1, 33, 70, 90, 100, 110) if target.dry else CONTEXTS
        self.rows = target.size(ROWS, 6)
        counts = [-(-length // BLOCK) for length in self.contexts]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        blocks = iter(order)
        self.tables = [[next(blocks) for _ in range(count)] for count in counts]
        self.storage = KVStorage(
            spec,
            sum(counts),
            BLOCK,
            dtype,
            torch.device(target.device),
            kv_cache_dtype=kept,
        )
        slots = torch.arange(sum(counts) * BLOCK, device=target.device)
        rows = (numbers(i, len(slots), kv_heads, width, device=target.device) for i in (1, 2))
        self.storage.write(0, slots, *rows)
        self.queries = [
            numbers(10 + place, min(length, self.rows), num_heads, width, device=target.device).to(
                dtype
            )
            for place, length in enumerate(self.contexts)
        ]

    def attend(
        self, attention: Attention, parts: Sequence[tuple[int, int, int]], window: int
    ) -> list[Tensor]:
        """Return the attention of several parts (sequence, first row, rows) of the queries, in one
        batch.
        """
        chunks, queries = [], []
        for index, first, rows in parts:
            sequence_queries = self.queries[index]
            start = self.contexts[index] - len(sequence_queries) + first
            used = self.tables[index][: -(-(start + rows) // BLOCK)]
            chunks.append(Rows([1] * rows, start, used))
            queries.append(sequence_queries[first : first + rows])
        batch = moved(batch_of_rows(chunks, BLOCK), self.device)
        plan = attention.plan(batch, BLOCK, window)
        q = torch.cat(queries)
        out = attention.attend(q, self.storage, 0, plan, self.scores)
        out = out.unflatten(1, (q.shape[1], -1))[:, :, self.scores.unread :]
        return list(out.split([rows for _, _, rows in parts]))


@pytest.mark.parametrize(
    ("window", "kept"), [(0, "auto"), (300, "auto"), (0, "fp8"), (300, "int8")]
)
@pytest.mark.parametrize("shape", HEADS)
def test_attention_row_is_bitwise_independent_of_its_batch(
    target: Target, dtype: torch.dtype, shape: str, window: int, kept: KVCacheDType
) -> None:
    if target.dry and (shape not in TOY_HEADS or kept == "int8"):
        pytest.skip("a dry run has one shape of each kind")
    if HEADS[shape][3] and kept != "auto":
        pytest.skip("latents have no codes")
    window = min(window, 20) if target.dry else window
    context = Context(target, dtype, (TOY_HEADS if target.dry else HEADS)[shape], kept)
    attention = Attention(batch_invariant=True)
    wholes = [(index, 0, len(queries)) for index, queries in enumerate(context.queries)]
    expected = context.attend(attention, wholes, window)  # all sequences in one batch
    for index, queries in enumerate(context.queries):
        name = f"{context.contexts[index]} keys, window {window}"
        (alone,) = context.attend(attention, [(index, 0, len(queries))], window)
        assert torch.equal(alone, expected[index]), f"alone, {name}"
        for size in CHUNKS:
            if target.dry and size == 1:
                continue  # like the last row below
            parts = [
                (index, first, min(size, len(queries) - first))
                for first in range(0, len(queries), size)
            ]
            joined = torch.cat([context.attend(attention, [part], window)[0] for part in parts])
            assert torch.equal(joined, expected[index]), f"chunks of {size}, {name}"
    last = [(index, len(queries) - 1, 1) for index, queries in enumerate(context.queries)]
    for rows, whole in zip(context.attend(attention, last, window), expected, strict=True):
        assert torch.equal(rows, whole[-1:]), "a decode next to decodes"
    mixed = [wholes[-1], *last[:-1]]
    rows_of_mix = context.attend(attention, mixed, window)
    assert torch.equal(rows_of_mix[0], expected[-1]), "a prompt next to decodes"
    for rows, whole in zip(rows_of_mix[1:], expected[:-1], strict=True):
        assert torch.equal(rows, whole[-1:]), "a decode next to a prompt"


@pytest.mark.parametrize("heads", [128, 20])
def test_latent_row_is_bitwise_independent_of_its_batch(
    target: Target, dtype: torch.dtype, heads: int
) -> None:
    heads, sizes = target.size(heads, 2), TOY_LATENT if target.dry else LATENT
    case = Latents(target, dtype, heads, sizes, target.size(300, 70))
    queries, keys, outputs = case.made(range(case.rows))
    for rows in (1, 2, 64, target.size(65, 66)):
        some = [(7 * row + 3) % case.rows for row in range(rows)]
        for got, whole in zip(case.made(some), (queries, keys, outputs), strict=True):
            assert torch.equal(got, whole[some]), f"{rows} rows of {heads} heads"


def sampled(rows: range, device: str, temperature: float, **options: float) -> SamplingBatch:
    """Return one draw from each of these rows of logits."""
    params = SamplingParams(temperature=temperature, raw_logprobs=True, **options)
    requests = [DrawRequest(params, place, (row, 0, 3)) for place, row in enumerate(rows)]
    return to_device(sampling_batch(requests), torch.device(device))


def same(one: Draw, other: Draw, part: slice) -> bool:
    names = ("token_ids", "logprobs", "raw_logprobs", "log_kept_mass")
    return all(torch.equal(getattr(one, name), getattr(other, name)[part]) for name in names)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 40}], ids=["plain", "filtered"])
@pytest.mark.parametrize("vocab", [151_936, 128_256, 262_144])
def test_logprobs_have_same_bits_in_every_mode_and_batch_size(
    target: Target, vocab: int, options: dict[str, float]
) -> None:
    if target.dry and vocab != 128_256:
        pytest.skip("a dry run has one vocabulary")
    num, size = target.size(256, 5), target.size(vocab, 5000)
    logits = numbers(1, num, size, device=target.device, scale=3.0)
    for temperature in (1.0, 0.7):
        many = sampling.draw(logits, sampled(range(num), target.device, temperature, **options))
        scored = sampling.score(
            logits,
            many.token_ids,
            torch.full((num,), 1.0, dtype=torch.float64, device=logits.device),
        )
        assert torch.equal(scored, many.raw_logprobs), "scored, the model's own"
        if not options:
            temperatures = torch.full(
                (num,), temperature, dtype=torch.float64, device=logits.device
            )
            again = sampling.score(logits, many.token_ids, temperatures)
            assert torch.equal(again, many.logprobs), "scored at the temperature"
        for first, rows in ((0, 1), (num - 1, 1), (1, target.size(7, 2)), (2, target.size(64, 3))):
            part = slice(first, first + rows)
            batch = sampled(range(first, first + rows), target.device, temperature, **options)
            few = sampling.draw(logits[part], batch)
            assert same(few, many, part), f"{rows} samples from {first} on"
            queue, own_logits = queue_of(torch.device(target.device)), logits[part].contiguous()
            with queue.current():
                captured = queue.capture(
                    lambda own_logits=own_logits, batch=batch: sampling.draw(own_logits, batch),
                    queue.new_pool(),
                )
                captured.replay()
            assert same(captured.output, many, part), f"{rows} samples, captured"

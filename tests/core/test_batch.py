"""`BatchBuilder` gathers from its arrays exactly the values of the sequences, step after step."""

import random
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference.config import SchedulerConfig
from nano_inference.core.batch import ALL, BatchBuilder, Chunks
from nano_inference.core.loop import Abort, Add, EngineLoop, LoopHooks
from nano_inference.core.sequence import (
    REFERENCE,
    CheckedRequest,
    Sequence,
    Sequences,
)
from nano_inference.kv_cache.hash_cache import PagedKVCache
from nano_inference.ops.batches import ForwardBatch, Rows, batch_of_rows
from nano_inference.sampling.columns import Entries, columns_of
from nano_inference.sampling.pipeline import drawable
from nano_inference.sampling.sample import sample
from nano_inference.sampling.sampling_batch import Biases, Masks, SamplingTable, mask_of
from nano_inference.sampling.tensors import (
    TORCH,
    DrawRequest,
    SamplingBatch,
    sampling_batch,
    torch_dtype,
)
from nano_inference.types import SamplingParams
from tests.simulation.fake_model import EOS, VOCAB, FakeRunner, FakeWeights, queue_update

BLOCK_SIZE = 2


class CheckedBuilder(BatchBuilder[Tensor]):
    """Compare every batch with its sequences, and recheck the previous batch: a step in flight may
    still read it.
    """

    def __init__(self) -> None:
        super().__init__(BLOCK_SIZE, TORCH)
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors of the last step, and their copies
        self.num_draws = self.num_slots_reused = 0

    def forward_batches(
        self, chunks: Chunks, sampling_now: Mapping[int, int]
    ) -> tuple[ForwardBatch, ...]:
        batches = super().forward_batches(chunks, sampling_now)
        for batch, (name, part) in zip(batches, chunks.parts, strict=True):
            chosen = [True] * len(chunks.seqs) if part is ALL else part.tolist()
            seqs = [seq for seq, own in zip(chunks.seqs, chosen, strict=True) if own]
            assert {seq.weight_set for seq in seqs} == {name}
            width = batch.block_tables.shape[1]
            assert width == max(len(seq.block_ids) for seq in seqs)
            for table, seq in zip(batch.block_tables.tolist(), seqs, strict=True):
                assert table[: len(seq.block_ids)] == seq.block_ids
            row_drafts = [drafts for drafts, own in zip(chunks.drafts, chosen, strict=True) if own]
            ends = [
                seq.num_computed_tokens + len(d) for seq, d in zip(seqs, row_drafts, strict=True)
            ]
            assert batch.seq_lens.tolist() == ends
            for drafts, end in zip(row_drafts, batch.cu_seqlens_q.tolist()[1:], strict=True):
                assert batch.input_ids[end - len(drafts) : end].tolist() == list(drafts)
            starts = [int(batch.positions[first]) for first in batch.cu_seqlens_q[:-1]]
            of_prompt = [
                min(seq.num_computed_tokens, seq.request.num_prompt_tokens) for seq in seqs
            ]
            assert batch.num_prompt_tokens == sum(
                max(0, n - s) for n, s in zip(of_prompt, starts, strict=True)
            )
            assert all(tensor.is_contiguous() for tensor in tensors(batch))
            assert_declared_dtypes(batch)
        return batches

    def sampling_batch(self, chunks: Chunks, masks: Masks, biases: Biases = ()) -> SamplingBatch:
        batch = super().sampling_batch(chunks, masks, biases)
        expected = sampling_batch(list(self.requests(chunks)))
        for name in (field.name for field in fields(batch)):
            mine, theirs = getattr(batch, name), getattr(expected, name)
            if isinstance(mine, Entries):
                assert as_rows(mine) == as_rows(theirs), name
            elif isinstance(mine, Tensor):
                assert mine.dtype == theirs.dtype, name
                assert mine.is_contiguous(), name
                assert torch.equal(mine, theirs), name
            else:
                assert mine == theirs, name
        assert all(torch.equal(tensor, copy) for tensor, copy in self.before), (
            "a batch of the step before was written"
        )
        self.before = [(tensor, tensor.clone()) for tensor in tensors(batch)]
        self.num_draws += len(batch)
        return batch

    @staticmethod
    def requests(chunks: Chunks) -> Iterator[DrawRequest]:
        for index, (seq, row) in enumerate(zip(chunks.sampled, chunks.rows.tolist(), strict=True)):
            drafts = chunks.behind.get(index, ())
            prompt, completion = (
                seq.token_ids[: seq.request.num_prompt_tokens],
                [*seq.token_ids[seq.request.num_prompt_tokens :], *drafts],
            )
            position = seq.num_computed_tokens + len(drafts)
            banned = (
                seq.request.stop_ids
                if position < len(prompt) + seq.request.params.min_tokens
                else ()
            )
            key = seq.request.seed, seq.sample_index, position
            yield DrawRequest(seq.request.params, row, key, prompt, completion, banned)


def tensors(batch: ForwardBatch | SamplingBatch) -> list[Tensor]:
    values = [getattr(batch, field.name) for field in fields(batch)]
    return [value for value in values if isinstance(value, Tensor)]


def assert_declared_dtypes(batch: ForwardBatch) -> None:
    for name, declared in columns_of(ForwardBatch).items():
        assert getattr(batch, name).dtype == torch_dtype(declared.dtype), name


def as_rows(entries: Entries) -> dict[int, dict[int, float]]:
    assert entries.rows.tolist() == sorted(entries.rows.tolist())
    rows: dict[int, dict[int, float]] = defaultdict(dict)
    for row, token_id, value in zip(*(column.tolist() for column in entries), strict=True):
        assert token_id not in rows[row]
        rows[row][token_id] = value
    return rows


def random_params(r: random.Random) -> SamplingParams:
    params = SamplingParams(max_tokens=r.randrange(3, 12), priority=r.choice([0, 0, 1]))
    if r.random() < 0.5:
        params = replace(
            params,
            temperature=r.choice([0.0, 0.5]),
            top_p=r.choice([1.0, 0.7]),
            top_k=r.choice([0, 3]),
        )
    if r.random() < 0.4:
        params = replace(
            params, presence_penalty=r.choice([0.0, 0.5]), repetition_penalty=r.choice([1.0, 1.2])
        )
    if r.random() < 0.3:
        params = replace(params, logit_bias={r.randrange(VOCAB): 1.5, EOS: -1.0})
    if r.random() < 0.3:
        params = replace(params, allowed_token_ids=frozenset(r.sample(range(VOCAB), 3)))
    if r.random() < 0.3:
        params = replace(
            params, min_tokens=2, top_logprobs=r.randrange(3), raw_logprobs=r.random() < 0.5
        )
    return params


class AnyDrafts:
    """Random drafts, some of them right by chance."""

    def __init__(self, r: random.Random) -> None:
        self._random = r
        self.num_drafted = 0

    def propose(
        self, live: Sequences, pending: Container[int], config: SchedulerConfig
    ) -> dict[int, tuple[int, ...]]:
        r = self._random
        return {seq.seq_id: tuple(r.choices(range(VOCAB), k=3)) for seq in live.running}

    def learn(self, seqs: Listed[Sequence], drafts: Mapping[int, tuple[int, ...]]) -> int:
        self.num_drafted += sum(map(len, drafts.values()))
        return 0


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_batch_matches_its_sequences(seed: int, lookahead: int, max_drafts: int) -> None:
    r = random.Random(seed)
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_tokens_per_batch=r.choice([4, 64]),
        max_batch_size=8,
        max_drafts=max_drafts,
    )
    blocks = r.choice([18, 30, 200])
    runner = FakeRunner(blocks * BLOCK_SIZE, BLOCK_SIZE)
    drafts = AnyDrafts(random.Random(seed)) if max_drafts else None
    loop = EngineLoop(
        *(PagedKVCache(blocks, BLOCK_SIZE), runner, config, lookahead, ""),
        LoopHooks(weights=FakeWeights(runner), drafter=drafts),
    )
    loop.batches = builder = CheckedBuilder()
    runner.one_version_only = False
    num_updates = 0
    if r.random() < 0.5:
        # scores every sample: a second weight set in the same steps
        loop.sequences.versions[REFERENCE] = 0
    for request in range(30):
        prompt = [r.randrange(1, VOCAB) for _ in range(r.randrange(1, 12))]
        num_samples = r.choice([1, 1, 3])
        loop.inbox.append(
            Add(
                Sequence(
                    loop.sequences.new_id(),
                    CheckedRequest(
                        request,
                        len(prompt),
                        random_params(r),
                        frozenset([EOS]),
                        r.randrange(2**64),
                    ),
                    prompt,
                    num_samples,
                )
            )
        )
        if r.random() < 0.1:
            loop.inbox.append(Abort(frozenset([request])))
        if r.random() < 0.1:
            num_updates += 1
            queue_update(loop, num_updates, r.choice(["recompute", "keep"]))
        for _ in range(r.choice([0, 1, 5])):
            loop.step()
    while loop.has_pending():
        loop.step()
    assert builder.num_draws > 100
    is_tight = config.max_tokens_per_batch == 4
    assert drafts is None or is_tight or drafts.num_drafted > 20
    assert len(builder._records) < loop.sequences.new_id(), (
        "slots of sequences that ended are used again"
    )


def test_refilled_slot_is_read_again() -> None:
    table, slots = SamplingTable(TORCH), np.zeros(1, dtype=np.int64)
    batches = []
    for temperature in (0.5, 0.25):
        table.put(0, SamplingParams(temperature=temperature), 1, 0, [])
        batches.append(table.batch(slots, slots, slots, {}))
    assert [batch.temperature.tolist() for batch in batches] == [[0.5], [0.25]]


def test_mask_may_change_at_every_draw() -> None:
    """Like a grammar, change the mask while the parameter tensors stay the same."""
    table, slots = SamplingTable(TORCH), np.arange(3)
    for slot in range(3):
        table.put(slot, SamplingParams(), slot, 0, [])
    before = table.batch(slots, slots, slots, {})
    assert not before.has_masks
    assert before.mask_words.numel() == 0
    logits = torch.zeros(3, 70)
    for allowed in ([3], [69]):
        batch = table.batch(slots, slots, slots, {}, [(1, mask_of(allowed))])
        assert batch.streams is before.streams
        assert batch.temperature is before.temperature
        assert drawable(batch, 70)[1].nonzero().flatten().tolist() == allowed
        assert drawable(batch, 70)[[0, 2]].all()
        assert sample(logits, batch).token_ids[1] == allowed[0]


def test_masks_of_256_rows_take_five_megabytes() -> None:
    vocab, rows = 151_936, np.arange(256)
    table = SamplingTable(TORCH)
    for slot in range(256):
        table.put(slot, SamplingParams(), 0, slot, [])
    masks = [(slot, mask_of(range(slot, vocab))) for slot in range(256)]
    batch = table.batch(rows, rows, rows, {}, masks)
    assert batch.mask_words.nbytes == 256 * vocab // 8  # 4.9 MB


def test_row_batch_is_built_without_a_scheduler() -> None:
    """`batch_of_rows` gets the same sequences: positions, slots and tables belong to each row."""
    chunks = [Rows([5, 6, 7], 3, [4, 1, 9]), Rows([8], 0, [2])]
    batch = batch_of_rows(chunks, BLOCK_SIZE, draws=[2, 3], scores=[(0, 6)])
    assert batch.input_ids.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slot_mapping.tolist() == [1 * 2 + 1, 9 * 2, 9 * 2 + 1, 2 * 2]
    assert batch.row_chunks.tolist() == [0, 0, 0, 1]
    assert batch.block_tables.tolist() == [[4, 1, 9], [2, 0, 0]]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [6, 1]
    assert batch.logits_indices.tolist() == [2, 3]
    assert (batch.score_rows.tolist(), batch.score_targets.tolist()) == ([0], [6])
    assert all(tensor.is_contiguous() for tensor in tensors(batch))
    assert_declared_dtypes(batch)


def test_chunk_without_rows_may_share_a_batch() -> None:
    batch = batch_of_rows([Rows([], 0, [1]), Rows([7], 2, [4, 4])], BLOCK_SIZE)
    assert batch.cu_seqlens_q.tolist() == [0, 0, 1]
    assert batch.row_chunks.tolist() == [1]
    assert batch.positions.tolist() == [2]
    assert batch.slot_mapping.tolist() == [4 * BLOCK_SIZE + 2 % BLOCK_SIZE]

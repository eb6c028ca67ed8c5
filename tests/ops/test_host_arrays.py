"""Code that all backends share: the same bits with host arrays and with tensors."""

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch

from nano_inference.arrays import HOST, as_host, as_torch, namespace
from nano_inference.core.batch import ForwardBatch
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.ops.formats import FORMATS
from nano_inference.ops.interface import call, embed_part
from nano_inference.ops.kv_codes import KvCodes, KvFormat
from nano_inference.ops.lora import Adapter, LoraPart, Place, lora, placed
from nano_inference.ops.moe import Experts, MoeSteps, Shared, mixture
from nano_inference.ops.quantised import encode, packed, product, quantise_rows, unpacked, widened
from nano_inference.ops.settings import Routing
from nano_inference.parallel.context import SEGMENT, ContextSplit, own_rows
from nano_inference.parallel.segments import tree_sum
from tests.same_bits import same

CPU = torch.device("cpu")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_modules_need_no_torch() -> None:
    names = [
        *(f"sampling.{name}" for name in ("tensors", "sample", "parts", "pipeline", "logit_scale")),
        *(f"parallel.{name}" for name in ("bounds", "context", "head", "mesh", "segments")),
        *(f"ops.{name}" for name in ("interface", "batches", "kv_codes", "lora", "moe")),
        *(f"ops.{name}" for name in ("quantised", "state", "stored_rows", "formats", "settings")),
    ]
    lines = ["import sys", "sys.modules['torch'] = None"]
    lines += [f"import nano_inference.{name}" for name in names]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_have_the_same_bits(name: str) -> None:
    form = FORMATS[name]
    bounds = (0, 40, 96)
    weight, x = numbers(5, 96), numbers(3, 96)
    weight[1], weight[2, 3], x[2, 50] = 0, torch.inf, torch.nan
    both = [encode(each, form, bounds) for each in (as_host(weight), weight)]
    for part in ("codes", "scales", "mins"):
        ours, theirs = (getattr(codes, part) for codes in both)
        assert (ours is None and theirs is None) or same(ours, theirs)
    ours, theirs = both
    assert same(ours.numbers(), theirs.numbers())
    assert same(ours.rows(1, 4).columns(32, 64).scales, theirs.rows(1, 4).columns(32, 64).scales)
    assert same(product(as_host(x), ours), product(x, theirs))
    stored = packed(ours.codes, form)
    assert same(stored, packed(theirs.codes, form))
    assert same(unpacked(stored, 96, form), ours.codes.numpy())
    wide = FORMATS["int4"] if name == "int4" else form
    assert same(widened(ours, wide, bounds).scales, widened(theirs, wide, bounds).scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codes", [None, "int8"])
def test_kept_keys_have_the_same_bits(dtype: torch.dtype, codes: KvCodes | None) -> None:
    rows = (100 * numbers(4, 2, 24)).to(dtype)
    rows[0, 1], rows[1, 0, 3] = 0, torch.inf
    host_rows = as_host(rows)
    ours, theirs = KvFormat(host_rows.dtype, codes), KvFormat(dtype, codes)
    kept = ours.encode(host_rows), theirs.encode(rows)
    assert same(*kept)
    assert kept[0].dtype == ours.stored
    assert same(ours.decode(kept[0]), theirs.decode(kept[1]))
    assert same(ours.rounded(host_rows), theirs.rounded(rows))


def test_rows_of_any_group_are_quantised_alike() -> None:
    x = numbers(3, 70).to(torch.bfloat16)
    groups = [(0, 32), (32, 32), (32, 70)]
    assert all(map(same, quantise_rows(as_host(x), groups), quantise_rows(x, groups)))


def test_sums_are_the_same() -> None:
    parts = numbers(8, 3, 5).to(torch.bfloat16)
    whole = tree_sum(parts)
    assert same(tree_sum(as_host(parts)), whole)
    assert same(tree_sum(list(as_host(parts))), whole)


def test_mixtures_are_the_same() -> None:
    def run(x: Any) -> tuple[Any, list[Any]]:
        xp, noted = namespace(x), []

        def route(x: Any, _: Experts) -> tuple[Any, Any]:
            ids = xp.tensor([[index % 2, 2] for index in range(len(x))])
            return ids, xp.cat((x[:, :2], x[:, 2:3] + 1), dim=1)

        def products(x: Any, rows: Any, held: Any, experts: Experts) -> Any:
            return x[rows] * (held[:, None] + 1).float() + experts.down

        def combine(products: Any, weights: Any) -> Any:
            return products[:, 0] * weights[:, :1] + products[:, -1] * weights[:, -1:]

        like = xp.zeros(4)
        experts = Experts(
            *(like, like, 1.0),
            num_experts=3,
            routing=Routing(2, True),
            activation="silu",
            shared=Shared(like, 2.0, gated=True),
            scales=xp.tensor([0.5, 2.0, 3.0]),
        )
        steps = MoeSteps(route, products, combine)
        return mixture(steps, x, experts, None, 2, noted.append), noted

    x = numbers(5, 4)
    (ours, our_ids), (theirs, their_ids) = run(as_host(x)), run(x)
    assert same(ours, theirs)
    assert all(map(same, our_ids, their_ids))


def test_adapters_add_the_same() -> None:
    x, y, a, b = numbers(4, 8), numbers(4, 12), numbers(2, 8), numbers(2, 5)

    def run(make: Any) -> Any:
        parts = {"weight": (LoraPart(3, make(a), make(b), 0.5),)}

        class Step:
            adapters = (Adapter("first", 1, {}), Adapter("own", 1, parts))
            row_adapters = make(torch.tensor([1, -1, 0, 1]))

        def linear(x: Any, weight: Any) -> Any:  # the same order of additions in both libraries
            total = x[:, :1] * weight[:, 0]
            for k in range(1, x.shape[1]):
                total = total + x[:, k : k + 1] * weight[:, k]
            return total

        return lora(make(y), make(x), "weight", Step(), linear)

    changed = run(lambda tensor: tensor)
    assert same(run(as_host), changed)
    assert not torch.equal(changed, y)


def test_matrices_are_placed_alike() -> None:
    for make in (as_host, as_torch):
        sources = [make(as_host(numbers(2, 3))), make(as_host(numbers(2, 3).to(torch.bfloat16)))]
        outs = [make(as_host(torch.empty(2, 3))), make(as_host(torch.empty(3, 2)))]
        write = placed([Place(outs[0], False), Place(outs[1], True)])
        assert write(sources) == -1
        assert torch.equal(as_torch(outs[1]), as_torch(sources[1]).float().T)
        sources[1][0, 1] = float("nan")
        assert write(sources) == 1


def test_parts_of_the_vocabulary_are_embedded_alike() -> None:
    table, ids = numbers(4, 3), torch.tensor([0, 5, 8, 9])

    def run(ids: Any, table: Any) -> Any:
        def embed(ids: Any, weight: Any, scale: float) -> Any:
            return weight[ids] * scale

        return embed_part(embed, ids, table, 2.0, (5, 12))

    assert same(run(as_host(ids), as_host(table)), run(ids, table))


def batches() -> list[ForwardBatch[Any]]:
    """Return the same rows as a batch of host arrays and as one of tensors."""
    chunks = [Rows(range(100), SEGMENT - 20, (2,)), Rows([4], 3 * SEGMENT, (1, 3))]
    scores = [(5, 7), (99, 3)]
    return [
        batch_of_rows(
            chunks, 2 * SEGMENT, draws=[99, 100], scores=scores, num_best=2, device=device
        )
        for device in (HOST, CPU)  # pyright: ignore
    ]


def test_batches_are_the_same() -> None:
    ours, theirs = batches()
    for field in fields(ForwardBatch):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert same(mine, other) if isinstance(other, torch.Tensor) else mine == other
    out = call(ours, lambda _, out: out.fill_(2.0), (), 3, as_host(torch.empty(0)).dtype)
    assert same(out, torch.full((101, 3), 2.0))


def test_ranks_exchange_the_same_rows() -> None:
    split = ContextSplit(2, 2 * SEGMENT)
    ours, theirs = (own_rows(batch, split, 1, (0, 40), 50) for batch in batches())
    for name in ("input_ids", "slot_mapping", "cu_seqlens_q", "score_targets", "best_rows"):
        assert same(getattr(ours, name), getattr(theirs, name))
    assert ours.context is not None
    assert theirs.context is not None
    assert same(ours.context.scores.order, theirs.context.scores.order)
    for window, pieces in ours.context.pieces.items():
        for mine, other in zip(pieces, theirs.context.pieces[window], strict=True):
            assert (mine.own_rows, mine.asked, mine.answered) == (
                *(other.own_rows, other.asked, other.answered),
            )
            assert all(map(same, mine.queries, other.queries))
            assert all(map(same, mine.answers, other.answers))
            assert same(mine.counts, other.counts)
            assert same(mine.order, other.order)
            assert all(map(same, mine.rows, other.rows))

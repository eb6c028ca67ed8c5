"""Layers of experts: backends compared with each other, single rows with batches, and experts
spread over ranks.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.models.sharding.rank_exchange import ExpertExchange
from nano_inference.models.spec.read import spec_from_config
from nano_inference.ops.cpu.backend import CpuOps
from nano_inference.ops.cpu.build import LAWS, Law
from nano_inference.ops.moe import (
    Biases,
    Exchange,
    Experts,
    MoeSteps,
    Shared,
    record_experts,
)
from nano_inference.ops.reference import backend as reference
from nano_inference.ops.settings import Routing
from tests.depth import at_depth
from tests.models.tiny import MORE_FAMILIES, llama_config
from tests.ops.cpu_kernels import as_packed, available
from tests.parallel.thread_group import ThreadGroup

HIDDEN = 48
CALM = settings(deadline=None, max_examples=at_depth(20))


class Backend(NamedTuple):
    run: Callable[[Tensor, Experts, Exchange | None], Tensor]
    steps: MoeSteps
    weight: Callable[[Tensor], Any]


CPU, ONE_THREAD = CpuOps(2), CpuOps(1)
BACKENDS = {
    "reference": Backend(reference.moe, reference.MOE, lambda weight: weight),
    "cpu": Backend(CPU.moe, CPU.moe.steps, as_packed),
}
try:
    from nano_inference.ops.cuda import moe as triton_moe

    BACKENDS["triton"] = Backend(triton_moe.moe, triton_moe.STEPS, lambda weight: weight)
except ImportError:
    pass


@given(
    slots=st.lists(st.integers(0, 39), min_size=1, max_size=7, unique=True),
    padding=st.lists(st.integers(0, 7), max_size=4),
    per_token=st.sampled_from([1, 3, 8]),
)
def test_triton_record_has_the_experts_of_each_slot(
    slots: list[int], padding: list[int], per_token: int
) -> None:
    """Padding rows, with a negative slot, may change the last slot only."""
    kernels = pytest.importorskip("nano_inference.ops.cuda.moe")
    where = list(slots)
    for index in padding:
        where.insert(index, -1)
    ids = torch.randint(0, 2**15, (len(where), per_token))
    record, defined = torch.full((2, 41, per_token), -1, dtype=torch.int16)
    kernels.record_experts(record, torch.tensor(where), ids)
    record_experts(defined, torch.tensor(where), ids)
    assert torch.equal(record[:-1], defined[:-1])
    assert (record[slots] >= 0).all()


def rows_of(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts_of(
    backend: Backend,
    *,
    count: int = 6,
    per_token: int = 3,
    inner: int = 32,
    renormalized: bool = False,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    held: range | None = None,
    router: Tensor | None = None,
    biased: bool = False,
    shared: str | None = None,
    biases: bool = False,
    **routing: Any,
) -> Experts:
    """Return random experts. `held`: experts on this rank. The shared expert may be `"plain"` or
    `"gated"`.
    """
    generator = torch.Generator().manual_seed(7)
    held = range(count) if held is None else held
    drawn = torch.randn((count, HIDDEN), generator=generator) * 0.3
    gate_up = torch.randn((count, 2 * inner, HIDDEN), generator=generator) * 0.2
    down = torch.randn((count, HIDDEN, inner), generator=generator) * 0.2
    gate = torch.randn((int(shared == "gated"), HIDDEN), generator=generator) * 0.3
    bias = torch.randn(count, generator=generator) * 0.3 if biased else None
    common = [torch.randn((96, HIDDEN), generator=generator) * 0.2]
    common.append(torch.randn((HIDDEN, 48), generator=generator) * 0.2)
    parts = (
        torch.cat((drawn if router is None else router, gate)),
        *(each[held.start : held.stop].flatten(0, 1) for each in (gate_up, down)),
        *common,
    )
    weights = [backend.weight(each.to(dtype)) for each in parts]
    added = [
        torch.randn(size, generator=generator)
        for size in ((count,), (count, 2 * inner), (count, HIDDEN))
    ]
    held_biases = (each[held.start : held.stop].flatten().to(dtype) for each in added[1:])
    return Experts(
        weights[0],
        weights[1],
        weights[2],
        count,
        Routing(per_token, renormalized, **routing),
        activation,
        bias,
        Shared(weights[3], weights[4], shared == "gated") if shared else None,
        Biases(added[0], *held_biases) if biases else None,
    )


def expected(x: Tensor, experts: Experts) -> Tensor:
    """Compute in float64, row by row and expert by expert."""
    router, gate_up, down = (
        each.double() for each in (experts.router, experts.gate_up, experts.down)
    )
    gate_ups, downs = gate_up.chunk(experts.num_experts), down.chunk(experts.num_experts)
    activations = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
        "clamped_swiglu": lambda z: z.clamp(max=7) * (1.702 * z.clamp(max=7)).sigmoid(),
    }
    clamped = experts.activation == "clamped_swiglu"
    biases = experts.biases or Biases(*(torch.zeros(1),) * 3)
    up_biases, down_biases = (
        each.double().view(-1, size) if len(each) > 1 else each.expand(experts.num_experts, 1)
        for each, size in ((biases.gate_up, len(gate_ups[0])), (biases.down, len(downs[0])))
    )

    def through(
        row: Tensor, gate_up: Tensor, down: Tensor, up_bias: Any = 0.0, down_bias: Any = 0.0
    ) -> Tensor:
        gate, up = (gate_up @ row + up_bias).chunk(2)
        up = up.clamp(-7, 7) + 1 if clamped else up
        return down @ (activations[experts.activation](gate) * up) + down_bias

    out = torch.zeros((len(x), HIDDEN), dtype=torch.float64)
    for row, total in zip(x.double(), out, strict=True):
        logits = router @ row + biases.router.double()
        for expert, weight in weights_of(logits[: experts.num_experts], experts).items():
            weights = gate_ups[expert], downs[expert], up_biases[expert], down_biases[expert]
            total += weight * through(row, *weights)
        if experts.shared is not None:
            weight = logits[-1].sigmoid() if experts.shared.gated else 1.0
            gate_up, down = (each.double() for each in experts.shared[:2])
            total += weight * through(row, gate_up, down)
    return out


def weights_of(logits: Tensor, experts: Experts) -> dict[int, float]:
    """Return the experts of each row and their routing weights."""
    routing = experts.routing
    scores = logits.softmax(dim=0) if routing.scores == "softmax" else logits.sigmoid()
    keys = scores if experts.bias is None else scores + experts.bias.double()
    size = experts.num_experts // routing.groups
    worth = [group.topk(routing.group_best).values.sum() for group in keys.split(size)]
    kept = torch.tensor(worth).topk(routing.groups_kept).indices.tolist()
    allowed = [expert for group in kept for expert in range(group * size, (group + 1) * size)]
    chosen = sorted(allowed, key=lambda expert: -float(keys[expert]))[: routing.per_token]
    total = float(scores[chosen].sum()) if routing.renormalized else 1.0
    scale = routing.scale / max(total, routing.floor)
    return {expert: float(scores[expert]) * scale for expert in chosen}


ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalized": True},
    "gelu": {"activation": "gelu_tanh"},
    "shared with a gate": {"shared": "gated"},
    "shared, biased": {"shared": "plain", "biased": True, "renormalized": True},
    "sigmoid": {"scores": "sigmoid", "renormalized": True, "scale": 2.5},
    "best groups": {"count": 12, "groups": 4, "groups_kept": 2, "scale": 16.0},
    "best pairs of groups": {
        "count": 12,
        "groups": 3,
        "groups_kept": 2,
        "group_best": 2,
        "shared": "plain",
        "scores": "sigmoid",
        "biased": True,
        "renormalized": True,
        "scale": 2.5,
    },
    "biases, bounded gate": {
        "biases": True,
        "activation": "clamped_swiglu",
        "renormalized": True,
    },
    "a floor": {"scores": "sigmoid", "renormalized": True, "floor": 2.0},
}


@pytest.mark.thorough(
    but=[
        "softmax-reference",
        "softmax-cpu",
        "gelu-reference",
        "gelu-cpu",
        "shared with a gate-reference",
        "best groups-reference",
        "best pairs of groups-reference",
        "biases, bounded gate-reference",
        "biases, bounded gate-cpu",
        "a floor-reference",
        "a floor-cpu",
    ]
)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_sum_over_a_rows_experts(name: str, routing: str) -> None:
    backend, options = BACKENDS[name], ROUTINGS[routing]
    x = rows_of(40)
    result = backend.run(x, experts_of(backend, **options), None)
    assert result.dtype == torch.float32
    plain = experts_of(BACKENDS["reference"], **options)
    torch.testing.assert_close(result.double(), expected(x, plain), rtol=1e-5, atol=1e-5)
    assert backend.run(x[:0], experts_of(backend, **options), None).shape == (0, HIDDEN)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_has_same_bits_on_every_instruction_set(
    law: Law, dtype: torch.dtype, routing: str
) -> None:
    x, experts = rows_of(40, dtype), experts_of(BACKENDS["cpu"], dtype=dtype, **ROUTINGS[routing])
    best, *others = (CpuOps(1, name).moe for name in available(law))
    ids, weights = best.route(x, experts)
    for other in others:
        assert torch.equal(other.route(x, experts)[0], ids)
        assert torch.equal(other.route(x, experts)[1], weights)
        assert torch.equal(other(x, experts), best(x, experts))


def test_bfloat16_on_the_cpu_is_near_the_reference() -> None:
    x = rows_of(33, torch.bfloat16)
    result = CPU.moe(x, experts_of(BACKENDS["cpu"], dtype=torch.bfloat16))
    near = reference.moe(x, experts_of(BACKENDS["reference"], dtype=torch.bfloat16))
    torch.testing.assert_close(result, near, rtol=2e-2, atol=2e-2)


@pytest.mark.thorough(but=["reference"])
@pytest.mark.parametrize("name", BACKENDS)
@CALM
@given(data=st.data(), count=st.integers(1, 20))
def test_moe_row_is_bitwise_independent_of_others(
    name: str, data: st.DataObject, count: int
) -> None:
    """Rows come in any order. Some experts get many rows, others none."""
    backend = BACKENDS[name]
    # the interpreter's bfloat16 product is wrong
    float32 = name == "triton" or data.draw(st.booleans())
    dtype = torch.float32 if float32 else torch.bfloat16
    routing = ROUTINGS[data.draw(st.sampled_from([*ROUTINGS]))]
    x, experts = rows_of(20, dtype), experts_of(backend, dtype=dtype, **routing)
    whole = backend.run(x, experts, None)
    some = torch.tensor(data.draw(st.lists(st.integers(0, 19), min_size=count, max_size=count)))
    assert torch.equal(backend.run(x[some], experts, None), whole[some])
    if name == "cpu":
        assert torch.equal(ONE_THREAD.moe(x[some], experts), whole[some])


@pytest.mark.thorough(cases=["triton"])
@pytest.mark.parametrize("name", BACKENDS)
def test_routing_ties_choose_the_lower_ids(name: str) -> None:
    backend = BACKENDS[name]
    router = rows_of(2)[[0, 1, 0, 1, 1, 0]]
    ids, weights = backend.steps.route(rows_of(16), experts_of(backend, router=router))
    assert {tuple(each) for each in ids.tolist()} <= {(0, 2, 5), (1, 3, 4)}
    assert torch.equal(weights[:, 0], weights[:, 2])
    ids, _ = backend.steps.route(rows_of(16), experts_of(backend, router=router, per_token=2))
    assert {tuple(each) for each in ids.tolist()} <= {(0, 2), (1, 3)}


@pytest.mark.thorough(cases=["triton"])
@pytest.mark.parametrize("name", BACKENDS)
def test_row_of_nan_does_not_affect_other_rows(name: str) -> None:
    backend = BACKENDS[name]
    x, experts = rows_of(4), experts_of(backend)
    whole = backend.run(x, experts, None)
    x[1] = torch.nan
    result = backend.run(x, experts, None)
    assert bool(result[1].isnan().all())
    assert torch.equal(result[[0, 2, 3]], whole[[0, 2, 3]])


def test_mismatched_experts_are_rejected() -> None:
    experts = experts_of(BACKENDS["cpu"])
    none = torch.empty(0, dtype=torch.int64)
    for rows, held, problem in ((5, 0, "a row does not exist"), (0, 6, "an expert does not exist")):
        with pytest.raises(ValueError, match=problem):
            CPU.moe.products(rows_of(2), none.new_tensor([rows]), none.new_tensor([held]), experts)
    with pytest.raises(ValueError, match="contiguous rows of 48"):
        CPU.moe(torch.ones((2, 32)), experts)
    with pytest.raises(ValueError, match="multiples of 16"):
        CPU.moe(rows_of(2), experts_of(BACKENDS["cpu"], inner=24))


def on_ranks(size: int, run: Callable[[ThreadGroup], Tensor]) -> list[Tensor]:
    groups = ThreadGroup.make(size, patience=20)
    results: dict[int, Tensor] = {}

    def work(group: ThreadGroup) -> None:
        try:
            results[group.rank] = run(group)
        finally:
            group.close() if group.rank not in results else None

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


@pytest.mark.thorough(
    cases=["2-True-cpu", "2-False-cpu", "3-True-cpu", "3-False-cpu", "4-True-cpu", "4-False-cpu"]
)
@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(("size", "shared"), list(itertools.product((2, 3, 4), (True, False))))
def test_expert_placement_changes_no_bit(name: str, size: int, shared: bool) -> None:
    """Ranks have the same rows or separate rows, and one rank may have none."""
    backend = BACKENDS[name]
    routing: dict[str, Any] = {"shared": "plain", "biases": True}
    bounds = [6 * rank // size for rank in range(size + 1)]
    for count in (1, 3, 41):
        x = rows_of(count)
        whole = backend.run(x, experts_of(backend, **routing), None)
        cuts = [0, 0, *(count * rank // (size - 1) for rank in range(1, size))]

        def run(group: ThreadGroup) -> Tensor:
            held = range(bounds[group.rank], bounds[group.rank + 1])
            rows = x if shared else x[cuts[group.rank] : cuts[group.rank + 1]]  # noqa: B023
            exchange = ExpertExchange(group, bounds, shared=shared)
            return backend.run(rows, experts_of(backend, held=held, **routing), exchange)

        results = on_ranks(size, run)
        if shared:
            assert all(torch.equal(each, whole) for each in results)
        else:
            assert torch.equal(torch.cat(results), whole)


def test_expert_fields_of_config_are_read() -> None:
    config = llama_config() | MORE_FAMILIES["qwen3-moe"]
    moe = spec_from_config(
        config | {"num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    ).moe
    assert moe is not None
    assert moe.layers == (False, True, False, False, False, True)
    assert not moe.routing.renormalized
    assert spec_from_config(config | {"num_experts": 0}).moe is None
    renamed = {name: value for name, value in config.items() if name != "num_experts"} | {
        "num_local_experts": 6
    }
    assert spec_from_config(renamed).moe == spec_from_config(config).moe
    with pytest.raises(Exception, match="cannot choose 7 experts for each token from 6"):
        spec_from_config(config | {"num_experts_per_tok": 7})

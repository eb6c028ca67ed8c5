"""The arithmetic of the bounds, compared with figures calculated by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roofline import (
    REFERENCE,
    Rates,
    Shape,
    Step,
    bound_of,
    reference_rows,
    shape_of,
    steps_of,
)
from benchmarks.workloads import NAMES, Request, Workload, distinct_prompt_tokens, workload
from nano_inference.models.spec.read import spec_from_config
from tests.depth import at_depth

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
ONE_EACH = Shape(layers=1_000_000, head=10_000, attention=1, weights=7, kv=100)


def test_shape_of_smollm2() -> None:
    shape = shape_of(spec_from_config(SMOLLM2))
    assert shape.layers == 2 * 106_168_320
    assert shape.head == 2 * 28_311_552
    assert shape.attention == 30 * 4 * 576
    assert shape.weights == 2 * (106_168_320 + 28_311_552)
    assert shape.kv == 30 * 2 * 192 * 2


@pytest.mark.parametrize(
    "row", reference_rows(shape_of(spec_from_config(SMOLLM2))), ids=list(REFERENCE)
)
def test_bounds_by_hand_are_reproduced(row: dict[str, float]) -> None:
    assert row["computed"] == pytest.approx(row["by_hand"], rel=0.005)


def test_steps_of_a_group_and_a_longer_neighbour() -> None:
    group, single = Request((1, 2, 3), 2, n=2), Request((1, 2), 3)
    first, second, third = steps_of(Workload("", "", (group, single)), ONE_EACH)
    # Three distinct tokens, because the second prompt is a prefix. Rows attend to 1 + 2 + 3 keys,
    # and two rows have logits.
    assert first == Step(3_000_000 + 20_000 + 6, 7 + 300)
    # Two samples at 4 keys, one at 3. All read the 3 shared tokens, and each reads one more.
    assert second == Step(3_030_000 + 11, 7 + 600)
    assert third == Step(1_010_000 + 4, 7 + 400)


@pytest.mark.parametrize("name", NAMES)
def test_roofline_counts_each_token_once(name: str) -> None:
    load = workload(name)
    steps = steps_of(load, Shape(layers=1, head=0, attention=0, weights=0, kv=0))
    rows = distinct_prompt_tokens(load.requests) + load.output_tokens - load.num_sequences
    assert sum(step.operations for step in steps) == rows


@settings(max_examples=at_depth(50))
@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=20),
    st.floats(1.0, 1e9),
    st.floats(1.0, 1e9),
)
def test_bound_lies_between_full_overlap_and_none(
    pairs: list[tuple[int, int]], product: float, read: float
) -> None:
    bound = bound_of([Step(*pair) for pair in pairs], Rates(product, read))
    assert max(bound.arithmetic, bound.reading) <= bound.bound * (1 + 1e-9)
    assert bound.bound <= bound.serial * (1 + 1e-9)
    assert bound.serial == pytest.approx(bound.arithmetic + bound.reading)

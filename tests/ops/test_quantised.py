"""Weights in 8 to 4 bits: the definition, and bitwise equality of every backend's weights and
products with it.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import AMX, best_instruction_set
from nano_inference.ops.formats import (
    FORMATS,
    FP8,
    QUANTIZATIONS,
    Format,
    Stack,
    bounds_of,
    fitting,
    form_named,
    widest,
)
from nano_inference.ops.interface import Ops
from nano_inference.ops.quantised import Codes, encode, product, quantise_rows, widened
from nano_inference.ops.reference.backend import reference_ops
from nano_inference.sampling.logit_scale import UNSCALED
from tests.depth import at_depth
from tests.ops.cpu_kernels import kernels

# AMX has separate loops, other instruction sets one loop for all row counts
LAST = ("cpu-pairs",) if best_instruction_set() == AMX else ()
BACKENDS = ("reference", "cpu", *LAST)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SEGMENTS = {
    64: (0, 32, 64),
    72: (0, 32, 64, 64, 72),
    33: None,
    96: (0, 12, 48, 60, 96),
    296: (0, 128, 256, 256, 296),
    1536: (0, 192, 384, 576, 768, 960, 1152, 1344, 1536),
}

STEPPED = [form for form in FORMATS.values() if form.scales == "steps"]
UNSTEPPED = [form for form in FORMATS.values() if form.scales != "steps"]

formats = st.sampled_from(sorted(FORMATS)).map(FORMATS.__getitem__)


@cache
def ops_of(backend: str) -> Ops:
    if backend == "reference":
        return reference_ops()
    kernels()
    return cpu_ops(1, sums="pairs" if backend in LAST else None)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of very different magnitudes, one of them zero."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sizes = 10.0 ** (torch.arange(shape[0]) % 5 - 2)
    sizes[shape[0] // 2] = 0
    return (drawn * sizes[:, None]).to(dtype)


def as_codes(weight: Tensor, form: Format, segments: tuple[int, ...] | None = None) -> Codes:
    return encode(weight, form, bounds_of(segments, weight.shape[1], form))


def stored(backend: str, weight: Tensor, form: Format, segments: Any = None) -> Any:
    stored_weight: Any = ops_of(backend).allocate(
        tuple(weight.shape), weight.dtype, CPU, form=form, segments=segments
    )
    stored_weight.write(0, weight)
    return stored_weight


# -- the definition --------------------------------------------------------------------------------


@settings(max_examples=at_depth(60))
@given(form=formats, columns=st.sampled_from([1, 5, 32, 33, 64, 96]), seed=st.integers(0, 99))
def test_codes_are_in_range_and_near_the_numbers(form: Format, columns: int, seed: int) -> None:
    weight = random(5, columns, seed=seed)
    codes = as_codes(weight, form)
    low, high = form.range
    if form.mins:
        low, high = low + form.middle, high + form.middle
    assert low <= int(codes.codes.min()) <= int(codes.codes.max()) <= high
    half, least = 0.51 if form.bits == 8 else 1.02, 6e-8 * 127  # 4-bit codes have no +8
    if form.values:  # tables end at 113 of 127 and at 12 of 16
        half, least = 14.1 if low == -127 else 4.1, least * 127
    for g, (first, last) in enumerate(codes.groups):
        difference = (codes.numbers() - weight)[:, first:last].abs()
        assert (difference <= half * codes.scales[:, g, None].abs() + least).all()
    assert not codes.numbers()[2].any()


@pytest.mark.thorough
@settings(max_examples=at_depth(60))
@given(form=formats, columns=st.sampled_from([4, 33, 64, 72, 96]), seed=st.integers(0, 99))
def test_product_is_near_the_unquantised_product(form: Format, columns: int, seed: int) -> None:
    codes = as_codes(random(6, columns, seed=seed), form, SEGMENTS.get(columns))
    x = random(5, columns, seed=seed + 100)
    rounded, scales = quantise_rows(x, codes.groups)
    assert rounded.abs().max() <= 127
    assert torch.equal(rounded, rounded.round())
    numbers = codes.numbers().double()
    steps = torch.zeros_like(x)
    for g, (first, last) in enumerate(codes.groups):
        steps[:, first:last] = scales[:, g, None]
    exact, most = x.double() @ numbers.T, steps.double() / 2 @ numbers.abs().T
    size = x.double().abs() @ numbers.abs().T
    assert ((product(x, codes) - exact).abs() <= most * 1.0001 + size * 1e-5).all()


@pytest.mark.parametrize("other", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_wider_format_holds_the_same_numbers(form: Format, other: Format) -> None:
    codes = as_codes(random(5, 96), form)
    wide = widened(codes, widest([form, other]), codes.bounds)
    assert torch.equal(wide.numbers(), codes.numbers())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_codes_of_a_file_are_stored_as_they_are(form: Format, backend: str) -> None:
    """Runs of rows begin and end within a panel, in this format and in one that it contains."""
    codes = as_codes(random(40, 288), form)
    wide = widest([form, FORMATS["int8-16-min"]])
    for stored_form in (form, wide):
        weight: Any = ops_of(backend).allocate((40, 288), torch.float32, CPU, form=stored_form)
        for first, last in ((0, 17), (17, 40)):
            weight.write_codes(first, codes.rows(first, last))
        assert torch.equal(weight.read(), codes.numbers())
        with pytest.raises(ValueError, match="do not fit"):
            weight.write_codes(38, codes.rows(0, 3))
        x = random(3, 288, seed=1)
        assert torch.equal(
            ops_of(backend).linear(x, weight), product(x, widened(codes, stored_form, (0, 288)))
        )


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_slice_of_whole_groups_is_valid_codes(form: Format) -> None:
    codes = as_codes(random(5, 288), form)
    for first, last in ((0, 128), (128, 256), (256, 288), (0, 288)):
        part = codes.columns(first, last)
        assert torch.equal(part.numbers(), codes.numbers()[:, first:last])
        assert part.bounds == (0, last - first)


def test_smallest_format_that_holds_codes() -> None:
    def name(*codes: Any) -> str | None:
        fit = fitting(*codes)
        return None if fit is None else fit.name

    assert name(4, 128, False, False) == "int4-128-wide"
    assert name(4, 96, False, False) == "int4-32"
    assert name(4, 96, True, False) == "int4-32-wide"
    assert name(4, 0, True, True) == "int4-128-min"
    assert name(4, 16, False, False) is None
    assert name(8, 0, False, False) == "int8"
    assert name(8, 64, False, False) == "int8-32"
    assert name(8, 256, True, False) == "int8-128-wide"
    assert name(8, 48, True, True) == "int8-16-min"
    assert name(5, 32, False, False) == "int5-32"
    assert widest([FORMATS["int4-32-wide"], FORMATS["int4-64-min"]]).name == "int8-32-min"
    assert widest([FORMATS["int4-32-steps"]]).name == "int4-32-steps"
    assert widest([FORMATS["int4-32-steps"]], 512).name == "int4-32-steps"
    assert widest([FORMATS["int4-32-steps"]], 480).name == "int4-32-min"
    assert widest([FORMATS["int4-32-steps"], FORMATS["int5-32-steps"]]).name == "int5-32-steps"
    assert widest([FORMATS["int4-32-steps"], FORMATS["int6-16-steps"]]).name == "int8-16-min"
    assert widest([FORMATS["int4-32"], FORMATS["int4-64-min"]]).name == "int4-32-min"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_number_makes_its_scale_nan(form: Format, bad: float) -> None:
    weight = random(4, 64)
    weight[1, 40] = bad
    codes = as_codes(weight, form)
    group = next(g for g, (first, last) in enumerate(codes.groups) if first <= 40 < last)
    assert codes.scales[1, group].isnan()
    others = codes.scales.clone()
    others[1, group if codes.steps is None else slice(None)] = 0
    assert others.isfinite().all()
    x = random(3, 64)
    x[0, 0] = bad
    result = product(x, as_codes(random(4, 64), form))
    assert result[0].isnan().all()
    assert result[1:].isfinite().all()


@pytest.mark.thorough(cases=["int8", "int4-32", "int8-16-wide", "int8-16-min"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_product_row_is_independent_of_other_rows(form: Format) -> None:
    codes, x = as_codes(random(40, 72), form, SEGMENTS[72]), random(50, 72, seed=1)
    together = product(x, codes)
    for row in range(len(x)):
        assert torch.equal(product(x[row : row + 1], codes)[0], together[row])


@pytest.mark.parametrize("form", STEPPED, ids=lambda form: form.name)
def test_scales_are_whole_steps(form: Format) -> None:
    codes = as_codes(random(40, 600), form)
    assert codes.steps is not None
    assert codes.steps.shape == (40, 3)
    assert (codes.min_steps is None) == (codes.mins is None)
    for scales, steps in ((codes.scales, codes.steps), (codes.mins, codes.min_steps)):
        if scales is not None and steps is not None:
            each = steps.repeat_interleave(form.groups_per_step, dim=1)[:, : scales.shape[1]]
            whole = torch.where(each == 0, 0.0, scales / each)
            assert torch.equal(whole, whole.round())
            assert whole.abs().max() == 127


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", STEPPED, ids=lambda form: form.name)
def test_steps_of_files_are_stored_as_they_are(form: Format, backend: str) -> None:
    """Files have any whole scales, and rows that begin within a step lose the step."""
    drawn = torch.Generator().manual_seed(0)
    codes = as_codes(random(40, 600), form)
    assert codes.steps is not None
    whole = torch.randint(-128, 128, codes.scales.shape, generator=drawn).float()
    each = codes.steps.repeat_interleave(form.groups_per_step, dim=1)[:, : whole.shape[1]]
    codes = replace(codes, scales=whole * each)
    part = codes.columns(128, 600)
    assert part.form.scales == "float"
    x = random(5, 600, seed=1)
    for weight, columns in (
        (codes, (0, 600)),
        (codes.columns(256, 600), (256, 600)),
        (part, (128, 600)),
    ):
        held: Any = ops_of(backend).allocate(
            tuple(weight.codes.shape), torch.float32, CPU, form=weight.form
        )
        held.write_codes(0, weight)
        assert torch.equal(held.read(), codes.numbers()[:, slice(*columns)])
        inputs = x[:, slice(*columns)].contiguous()
        assert torch.equal(ops_of(backend).linear(inputs, held), product(inputs, weight))
        wide = widest([weight.form], columns=1)
        exact = product(inputs, widened(weight, wide, weight.bounds))
        assert torch.allclose(product(inputs, weight), exact, rtol=0.05, atol=float(exact.std()))


@pytest.mark.parametrize("form", STEPPED, ids=lambda form: form.name)
def test_sums_within_a_step_are_whole_numbers(form: Format) -> None:
    codes, x = as_codes(random(20, 600), form), random(5, 600, seed=1)
    assert codes.steps is not None
    inputs, own = quantise_rows(x, [(0, 256), (256, 512), (512, 600)])
    inputs = inputs.long()
    total = torch.zeros(5, 20)
    for t, (first, last) in enumerate(((0, 256), (256, 512), (512, 600))):
        groups = [column // form.group for column in range(first, last)]
        part, step = inputs[:, first:last], codes.steps[:, t]
        numbers = torch.where(step == 0, 0.0, codes.scales.T / step)[groups].round().long().T
        whole = part @ (codes.codes[:, first:last].long() * numbers).T
        total += whole.float() * (own[:, t, None] * step)
        if codes.mins is not None and codes.min_steps is not None:
            step = codes.min_steps[:, t]
            numbers = torch.where(step == 0, 0.0, codes.mins.T / step)[groups].round().long()
            total -= (part @ numbers).float() * (own[:, t, None] * step)
    assert torch.equal(product(x, codes), total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", UNSTEPPED, ids=lambda form: form.name)
def test_dequantised_numbers_encode_to_the_same_codes(form: Format, dtype: torch.dtype) -> None:
    """A receiving engine gets the same weights, except for groups so small that a float16 scale has
    few digits.
    """
    codes = as_codes(random(2000, 96, dtype=dtype), form)
    again = as_codes(codes.numbers().to(dtype), form)
    whole = (codes.scales == 0) | (codes.scales.abs() >= torch.finfo(torch.float16).tiny)
    assert whole.float().mean() > 0.9
    assert torch.equal(again.scales[whole], codes.scales[whole])
    for g, (first, last) in enumerate(codes.groups):
        rows = whole[:, g]
        assert torch.equal(again.codes[rows, first:last], codes.codes[rows, first:last])


def test_segments_not_aligned_to_groups_are_joined() -> None:
    assert bounds_of((0, 12, 48), 48, FORMATS["int8"]) == (0, 12, 48)
    assert bounds_of((0, 12, 48), 48, FORMATS["int8-32"]) == (0, 48)
    assert bounds_of((0, 10, 48), 48, FORMATS["int8"]) == (0, 48)
    assert bounds_of(None, 48, FORMATS["int8"]) == (0, 48)
    assert bounds_of((0, 300, 512, 600), 600, FORMATS["int4-32-steps"]) == (0, 600)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [1024, 2048, 4096, 8192, 9728, 19456])
def test_segments_of_equal_width_are_merged(columns: int, ranks: int) -> None:
    """A rank merges its own segments as one rank merges them all."""
    form, width = FORMATS["int6-16-steps"], columns // 8
    whole = bounds_of(tuple(range(0, columns + 1, width)), columns, form)
    assert len(whole) - 1 == {1024: 4, 9728: 2, 19456: 4}.get(columns, 8)
    if (len(whole) - 1) % ranks:
        return
    local = bounds_of(tuple(range(0, columns // ranks + 1, width)), columns // ranks, form)
    assert local == tuple(bound for bound in whole if bound <= columns // ranks)
    assert {each for pair in QUANTIZATIONS.values() for each in pair} < {*FORMATS.values(), FP8}


# -- backends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", SEGMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_products_and_rows_equal_the_definition_bitwise(
    backend: str, columns: int, dtype: torch.dtype, form: Format
) -> None:
    ops, segments = ops_of(backend), SEGMENTS[columns]
    numbers, x = random(40, columns, dtype=dtype), random(19, columns, seed=1, dtype=dtype)
    weight, codes = stored(backend, numbers, form, segments), as_codes(numbers, form, segments)
    assert (weight.shape, weight.dtype, weight.form) == ((40, columns), dtype, form)
    assert (weight.bounds, weight.device) == (codes.bounds, CPU)
    assert weight.numel() == numbers.numel()
    assert torch.equal(weight.read(), codes.numbers().to(dtype))
    assert torch.equal(weight.read(3, 5), codes.numbers()[3:8].to(dtype))
    assert torch.equal(ops.linear(x, weight, None, segments).float(), product(x, codes))
    bias = random(40, 1, seed=2, dtype=dtype)[:, 0]
    biased = ops.linear(x, weight, bias, segments)
    assert torch.equal(biased.float(), product(x, codes) + bias.float())
    logits = ops.logits(x, weight, UNSCALED)
    assert torch.equal(logits, product(x, codes))
    ids = torch.tensor([39, 0, 7, 7])
    assert torch.equal(ops.embed(ids, weight, 2.0), codes.numbers()[ids] * 2)
    part = ops.embed(torch.tensor([99, 100, 140]), weight, 1.0, (100, 300))
    assert torch.equal(part, torch.stack((-0.0 * part[1], codes.numbers()[0], -0.0 * part[1])))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_rows_are_written_in_place_and_copies_are_unchanged(backend: str, form: Format) -> None:
    weight = stored(backend, random(40, 72), form)
    copy, address = weight.clone(), weight.data_ptr()
    before = weight.read()
    rows = random(5, 72, seed=3)
    weight.write(11, rows.double())
    assert weight.data_ptr() == address
    assert torch.equal(copy.read(), before)
    expected = before.clone()
    expected[11:16] = as_codes(rows, form).numbers()
    assert torch.equal(weight.read(), expected)
    for start, wrong in ((0, random(3, 71)), (38, random(3, 72)), (-1, random(3, 72))):
        with pytest.raises(ValueError, match="do not fit"):
            weight.write(start, wrong)
    with pytest.raises(ValueError, match="are not within the weight's 40 rows"):
        weight.read(38, 3)


@pytest.mark.parametrize(
    "form",
    [
        Format("int8-64", 8, 64, scales="float"),
        Format("int4-16-min", 4, 16, scales="float", mins=True),
        Format("int8-narrow", 8, 0),
        Format("int2-32", 2, 32),
        Format("int6-32-steps", 6, 32, scales="steps"),
    ],
    ids=lambda form: form.name,
)
def test_format_without_cpu_kernels_is_rejected(form: Format) -> None:
    with pytest.raises(
        ValueError, match=f"the CPU kernels do not support the format '{form.name}'"
    ):
        ops_of("cpu").allocate((16, 64), torch.float32, CPU, form=form)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stack_equals_its_parts(backend: str) -> None:
    ops, rows = ops_of(backend), random(88, 600)
    stack = Stack(
        tuple(
            (n, FORMATS[name])
            for n, name in ((48, "int4-32-steps"), (16, "int8-32"), (24, "int6-16-steps"))
        )
    )
    assert form_named(stack.name) == stack
    assert [stack.at(row).bits for row in (0, 47, 48, 63, 64, 87)] == [4, 4, 8, 8, 6, 6]
    weight: Any = ops.allocate((88, 600), torch.float32, CPU, form=stack)
    assert (weight.shape, weight.form, weight.numel()) == ((88, 600), stack, 88 * 600)
    weight.write(0, rows)
    ends = [(0, 48), (48, 64), (64, 88)]
    codes = [
        as_codes(rows[first:last], form)
        for (first, last), (_, form) in zip(ends, stack.parts, strict=True)
    ]
    x, bias = random(70, 600, seed=1), random(88, 1, seed=2)[:, 0]
    for count in (1, 3, 20, 70):
        expected = torch.cat([product(x[:count], part) for part in codes], dim=1)
        assert torch.equal(ops.linear(x[:count], weight), expected)
        assert torch.equal(ops.linear(x[:count], weight, bias), expected + bias)
    numbers = torch.cat([part.numbers() for part in codes])
    assert torch.equal(weight.read(), numbers)
    assert torch.equal(weight.read(40, 30), numbers[40:70])
    copy = weight.clone()
    weight.write_codes(50, codes[1].rows(0, 10))
    assert torch.equal(weight.read(50, 10), codes[1].numbers()[:10])
    assert torch.equal(copy.read(), numbers)
    with pytest.raises(ValueError, match="do not fit"):
        weight.write(80, random(9, 600))

"""Products of codes by the builds that this processor would not choose."""

from typing import Any

import pytest
import torch

from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.formats import Format
from nano_inference.ops.quantised import product
from tests.ops.cpu_kernels import available, kernels
from tests.ops.test_quantised import CPU, FORMATS, as_codes, random


@pytest.mark.parametrize("instructions", available()[1:])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_products_equal_the_definition_bitwise(form: Format, instructions: str) -> None:
    kernels(instructions)
    ops, numbers, x = cpu_ops(1, instructions), random(40, 288), random(14, 288, seed=1)
    weight: Any = ops.allocate((40, 288), torch.float32, CPU, form=form)
    weight.write(0, numbers)
    for count in (1, 3, 14):
        assert torch.equal(
            ops.linear(x[:count], weight), product(x[:count], as_codes(numbers, form))
        )

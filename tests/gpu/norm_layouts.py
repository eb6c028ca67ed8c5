"""Compare the order in which two kernels add up the squares of a norm: that of `rows.rms_norm`, and
the one that also rounds the row to codes.

    python -m tests.gpu.norm_layouts

The order follows from the number of warps and from the layout that Triton chooses for the sum. You
need no GPU. Triton's interpreter must be off (`main` turns it off).
"""

import json
import os
import re
from itertools import product
from typing import Any

import torch

from nano_inference.ops.formats import FORMATS
from nano_inference.ops.interface import Norm
from tests.gpu.compiled import compiling

WIDTHS = (640, 1024, 1536, 2048, 2560, 2880, 3584, 4096)
DTYPES = (torch.bfloat16, torch.float16)
WEIGHTS = (None, torch.float32)  # of a norm; None: the dtype of its result
ARCHS = (80, 90, 100)


def order_of_sum(kernel: Any) -> tuple[int, str]:
    """Return the number of warps and the layout of a kernel's first sum."""
    ir = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    reduced = re.search(r'"tt.reduce"\(.*?\}\) : \(tensor<[^#]*(#\w+)>', ir, re.DOTALL)
    assert reduced is not None, "the kernel has no sum"
    return kernel.metadata.num_warps, layouts[reduced.group(1)]


def main() -> None:
    """Print the cases in which both kernels use different orders, and the number of all cases."""
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
    from nano_inference.ops.cuda.few_whole_rows import normed_codes
    from nano_inference.ops.cuda.quantised import AlignedWeight
    from nano_inference.ops.cuda.rows import rms_norm

    cases, others = 0, list[str]()
    for arch, dtype, width, of_weight in product(ARCHS, DTYPES, WIDTHS, WEIGHTS):
        residual = torch.empty(3, width, dtype=torch.float32)
        norm = Norm(torch.empty(width, dtype=of_weight or dtype), 1e-6, 0.0, dtype)
        weight = AlignedWeight((64, width), dtype, torch.device("cpu"), FORMATS["int8"])
        with compiling(arch) as made:
            rms_norm(None, residual, norm)
            rms_norm(torch.empty(3, width, dtype=torch.float32), residual, norm)
            normed_codes(residual, norm, weight)
        assert len(made) == 3, "codes took a launch of their own"
        orders = {order_of_sum(kernel) for kernel in made}
        cases += 1
        if len(orders) > 1:
            others.append(f"sm_{arch}, {dtype}, {of_weight}, {width}: {orders}")
    print(json.dumps({"cases": cases, "others": others}))


if __name__ == "__main__":
    main()

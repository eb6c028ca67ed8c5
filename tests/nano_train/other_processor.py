"""`python -m tests.nano_train.other_processor ARGUMENTS`: the command line on a processor without
vector instructions, for kernels and, with ATEN_CPU_CAPABILITY=default, for torch.
"""

import torch

from nano_inference.cli import app
from tests.ops.cpu_kernels import instruction_set

if __name__ == "__main__":
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    with instruction_set("portable"):
        app(prog_name="nano-inference")

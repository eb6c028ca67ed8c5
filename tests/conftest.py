"""Profiles of hypothesis (`mutants` reports the first failure without searching for a smaller one),
options, Ctrl-C.
"""

import os
import signal

from tests.interpreter import adapt, choose_products

choose_products()  # before NumPy is imported

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

# Where there is no GPU the Triton kernels run in its interpreter, which must be known before it is
# first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))

# A shell starts what runs in its background deaf to Ctrl-C, and children inherit that; tests press
# it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the replies of golden exchanges anew"
    )
    parser.addoption(
        "--gpu-dry-run", action="store_true", help="tests/gpu at toy size in Triton's interpreter"
    )


def pytest_runtest_setup() -> None:
    adapt()

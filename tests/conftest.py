"""Hypothesis profiles (`mutants` reports the first failure without shrinking), options, Ctrl-C."""

import inspect
import os
import signal
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from tests import depth
from tests.interpreter import adapt

# Without a GPU the Triton kernels run in its interpreter, which must be chosen before the first
# import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Examples have no deadline and no health check for speed, because both depend on the machine.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("whole")  # later profiles extend it
settings.register_profile("quick", max_examples=depth.at_depth(100))
# Mutants meet the same examples in each run, so that luck decides nothing.
settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), derandomize=True)

# Two defaults of httpx do not suit tests. Its client waits 5 seconds, and a first step may take longer
# on a slow machine. It also reads every certificate authority, 25 ms of a core for each request that
# makes its own client; here all clients share one list.
SHARED = {"timeout": httpx.Timeout(30.0), "verify": httpx.create_ssl_context()}
for function in (
    *(httpx.get, httpx.post, httpx.put, httpx.patch, httpx.delete, httpx.head, httpx.options),
    *(httpx.request, httpx.stream, httpx.Client.__init__, httpx.AsyncClient.__init__),
):
    inspect.unwrap(function).__kwdefaults__.update(SHARED)

# A shell makes background processes ignore Ctrl-C, and children inherit that; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the replies of golden exchanges"
    )
    parser.addoption(
        "--tier",
        choices=depth.TIERS,
        help="test tier, see depth.py; default: quick for all of tests, else all",
    )
    parser.addoption(
        "--gpu-dry-run", action="store_true", help="tests/gpu at toy size in Triton's interpreter"
    )


def pytest_configure(config: pytest.Config) -> None:
    everything = not config.option.keyword and {Path(each).name for each in config.args} == {
        "tests"
    }
    depth.tier = config.getoption("--tier") or ("quick" if everything else "all")
    if depth.tier == "quick" and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other tier."""
    kept = [each for each in items if depth.runs(_is_thorough(each), _depends_on_tier(each))]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[each for each in items if each not in kept])
        items[:] = kept


def _is_thorough(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("thorough")
    if mark is None:
        return False
    case = getattr(getattr(item, "callspec", None), "id", None)
    return depth.is_thorough(case, mark.kwargs.get("cases"), mark.kwargs.get("but", ()))


def _depends_on_tier(item: pytest.Item) -> bool:
    """Return True if the tier changes its examples or kernel builds (`cpu_kernels.available`)."""
    if not isinstance(item, pytest.Function):
        return False
    if hasattr(item.module, "available"):
        return True
    # also tests that choose settings at run time
    code = getattr(item.function, "__code__", None)
    return is_hypothesis_test(item.obj) or (
        code is not None and not {"at_depth", "share_of"}.isdisjoint(code.co_names)
    )


def pytest_runtest_setup() -> None:
    adapt()

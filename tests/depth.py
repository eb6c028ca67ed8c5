"""Depth of the tests: tiers, examples and builds.

If pytest collects all of `tests`, `--tier` selects from them. `quick` (`make test`) leaves out the
tests marked `thorough` (or the marked cases of a test), tries a quarter of the examples of property
tests, and uses two builds of the CPU kernels. `rest` runs the remainder: the thorough tests, and
the property and kernel tests with all examples and builds. `all` runs everything with all examples.
Tests selected by file, by name or by `-k` run as in `all`, unless you pass a tier.
"""

import random
from collections.abc import Collection, Iterable
from typing import TypeVar

T = TypeVar("T")
TIERS = ("quick", "rest", "all")
tier = "quick"  # set by conftest.py before tests are imported


def at_depth(examples: int) -> int:
    """Return `max_examples` for hypothesis."""
    return min(examples, max(5, examples // 4)) if tier == "quick" else examples


def share_of(cases: Iterable[T]) -> list[T]:
    """Return cases of an exhaustive test: an eighth of them in `quick`, half in `rest`, else all.
    The selection is the same in each run.
    """
    every = list(cases)
    part = {"quick": 8, "rest": 2}.get(tier, 1)
    return random.Random(0).sample(every, -(-len(every) // part)) if part > 1 else every


def runs(is_thorough: bool, depends_on_tier: bool) -> bool:
    """Return True if this tier has the test.

    Args:
        is_thorough: The test is marked.
        depends_on_tier: Its examples or builds do, so that `rest` has more for it.
    """
    if tier == "rest":
        return is_thorough or depends_on_tier
    return tier == "all" or not is_thorough


def is_thorough(case: str | None, cases: Collection[str] | None, but: Collection[str]) -> bool:
    """Return True if a mark `thorough(cases=..., but=...)` covers a case (None: no parameters)."""
    return case in cases if cases is not None else case not in but

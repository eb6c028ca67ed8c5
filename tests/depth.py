"""How deep tests look.

`make test` is for people: where pytest collects all of `tests`, the tier `quick` leaves out the
tests of `thorough.txt`, property tests try a quarter of their examples, and tests of the CPU
kernels have two builds of them. `rest` runs what that left: the thorough tests, and those tests
with all of their examples and builds. `all` runs everything, with all
examples. What is asked for by file, by name or by `-k` runs whole, as in `all`, unless a tier is
asked for too.
"""

import random
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TIERS = ("quick", "rest", "all")
LIST = Path(__file__).parent / "thorough.txt"  # written by scripts/tiers.py
tier = "quick"  # set by conftest.py before tests are imported


def at_depth(examples: int) -> int:
    """For hypothesis's `max_examples`."""
    return min(examples, max(5, examples // 4)) if tier == "quick" else examples


def share_of(cases: Iterable[T]) -> list[T]:
    """Cases of an exhaustive test: an eighth of them in `quick`, half in `rest`, else all. The same
    ones in each run.
    """
    every = list(cases)
    part = {"quick": 8, "rest": 2}.get(tier, 1)
    return random.Random(0).sample(every, -(-len(every) // part)) if part > 1 else every


def thorough() -> set[str]:
    """Names of tests as pytest writes them, with or without a case in brackets."""
    return {line for line in LIST.read_text().splitlines() if line and not line.startswith("#")}


def runs(name: str, depends_on_tier: bool, names: Collection[str]) -> bool:
    """Whether this tier has the test.

    Args:
        name: as pytest writes it.
        depends_on_tier: what it tries does, so that `rest` has more for it.
        names: those of the thorough tests.
    """
    is_thorough = name in names or name.partition("[")[0] in names
    if tier == "rest":
        return is_thorough or depends_on_tier
    return tier == "all" or not is_thorough

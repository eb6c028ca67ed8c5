"""`python scripts/tiers.py JUNIT.xml`: choose the tests that `make test` leaves out, by their cost.

`pytest --tier all -o junit_duration_report=call --junitxml=JUNIT.xml tests` measures, or, of what
`make test` runs today, the tier `quick`: what is left out already and was not measured stays so.
Calls alone count: a fixture that a test leaves behind is paid by the next. The most expensive cases
go to tests/thorough.txt, until the rest takes `--seconds` of one core. Of a function whose cases
would all go, the cheapest stays if it is cheap. Tests that turn the seeded faults of the centre red
stay.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1] / "tests"
# The tests that the seeded faults of the centre turn red (tests/mutants/run.py).
KEPT = (
    "tests/simulation/test_simulation.py",
    "tests/invariance/test_schedule_invariance.py",
    "tests/kv_cache/",
    "tests/core/",
    "tests/ops/test_reference.py",
    "tests/core/test_batch.py",
    "tests/engine/test_kv_policies.py",
    "tests/engine/test_groups.py",
    "tests/sampling/",
)
CHEAP = 2.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--seconds", type=float, default=550.0, help="of one core, for what stays")
    options = parser.parse_args()
    cases = times(options.junit)
    left = sum(cases.values())
    gone: set[str] = set()
    for name, seconds in sorted(cases.items(), key=lambda case: -case[1]):
        if left <= options.seconds:
            break
        if not name.startswith(KEPT):
            gone.add(name)
            left -= seconds
    before = {each for each in (TESTS / "thorough.txt").read_text().splitlines() if "::" in each}
    gone |= {name for name in before if name not in cases and name.partition("[")[0] not in cases}
    functions = defaultdict[str, list[str]](list)
    for name in {**cases, **dict.fromkeys(gone)}:
        functions[name.partition("[")[0]].append(name)
    lines: list[str] = []
    for function, names in functions.items():
        cheapest = min(names, key=lambda name: cases.get(name, CHEAP + 1))
        if len(names) > 1 and gone.issuperset(names) and cases.get(cheapest, CHEAP + 1) <= CHEAP:
            gone.discard(cheapest)
        chosen = gone.intersection(names)
        lines += [function] if len(chosen) == len(names) else sorted(chosen)
    head = f"# By scripts/tiers.py: `make test` leaves out {len(gone)} of {len(cases)} cases.\n"
    (TESTS / "thorough.txt").write_text(head + "\n".join(sorted(lines)) + "\n")
    kept = sum(seconds for name, seconds in cases.items() if name not in gone)
    print(f"{head.strip('# ')}{sum(cases.values()):,.0f} s in all, {kept:,.0f} s stay")


def times(junit: Path) -> dict[str, float]:
    """Names as pytest writes them -> seconds."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        file, _, within = case.get("classname", "").partition(".Test")
        classes = f"Test{within}::" if within else ""
        found[f"{file.replace('.', '/')}.py::{classes}{case.get('name')}"] = float(
            case.get("time", 0)
        )
    return found


if __name__ == "__main__":
    main()

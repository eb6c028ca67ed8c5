"""`python scripts/tiers.py JUNIT.xml`: list the most expensive tests, for the mark `thorough`.

`pytest --tier quick -o junit_duration_report=call --junitxml=JUNIT.xml tests` measures calls only,
without fixtures. Mark tests, or their expensive cases, until the quick tier takes `--seconds` of
one core. Do not mark tests that detect the seeded faults of core/.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=550.0, help="seconds of one core for the remaining tests"
    )
    options = parser.parse_args()
    cases = times(options.junit)
    total = left = sum(cases.values())
    chosen: dict[str, list[str]] = defaultdict(list)
    for name, seconds in sorted(cases.items(), key=lambda case: -case[1]):
        if left <= options.seconds:
            break
        function, _, case = name.partition("[")
        chosen[function].append(f"{case.removesuffix(']')} ({seconds:.1f} s)")
        left -= seconds
    for function, listed in chosen.items():
        print(f"{function}: {', '.join(listed)}")
    print(f"{total:,.0f} s in total, {left:,.0f} s remain")


def times(junit: Path) -> dict[str, float]:
    """Map the names of tests, as pytest writes them, to seconds."""
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

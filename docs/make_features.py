"""`python docs/make_features.py`: write the table of incompatible features between its markers in
docs/what-works.md, from `nano_inference.features`. `--check` fails if the page is not current and
writes nothing. A test checks the same.
"""

import sys
from pathlib import Path

from nano_inference.features import ALL_LIMITS, BACKENDS, LOCKSTEP, SHARED, TRAITS, Asked, Row

TARGET = Path(__file__).parent / "what-works.md"
BEGIN, END = "<!-- features -->", "<!-- end of features -->"
FACTS = {
    LOCKSTEP: "engines in lockstep",
    SHARED: "several ranks",
    "whole_model": "`embed`, `replay`, `DraftTrainer`, scoring of targets",
    "beside_policy": "weights of a model other than the policy",
}


def page(text: str) -> str:
    """Return the page with the current table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """One line a row of `nano_inference.features`."""
    lines = ["| feature | option | not with | reason | do this |", "|---|---|---|---|---|"]
    lines += [_line(row) for limits in ALL_LIMITS for row in limits.rows]
    return "\n".join(lines)


def _line(row: Row) -> str:
    asked = ", ".join(map(_named, row.asked_by))
    if row.when:
        asked += f" with {', '.join(map(_named, row.when))}"
    traits = [each.name for each in row.clashes if each.name in TRAITS]
    clashes = [_named(each) for each in row.clashes if each.name not in TRAITS]
    if traits:
        clashes.insert(0, f"models with {', '.join(traits)}")
    if backends := [each for each in BACKENDS if each not in row.backends]:
        clashes.append(f"backend {', '.join(backends)}")
    if row.needs:
        clashes.append(f"without {' or '.join(map(_named, row.needs))}")
    return f"| {row.feature} | {asked} | {', '.join(clashes)} | {row.reason} | {row.instead} |"


def _named(asked: Asked) -> str:
    if asked.name in FACTS:
        return FACTS[asked.name]
    others = (
        " other than " + " or ".join(f"`{value!r}`" for value in asked.but) if asked.but else ""
    )
    names = str(asked._replace(but=())).split(" or ")
    return ", ".join(f"`{each}`" for each in names) + others


def main() -> int:
    """Write the page, or check it."""
    text = TARGET.read_text(encoding="utf-8")
    new = page(text)
    if "--check" in sys.argv[1:]:
        return int(text != new)
    TARGET.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

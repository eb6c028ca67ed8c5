"""The figures of README's table are those of the committed report, from which the chart above it is
drawn.
"""

import json
import re

import pytest

from benchmarks.measure import RESULTS
from benchmarks.peers.compare import OURS, best
from benchmarks.plots import RATES
from tests.docs.test_docs import ROOT

# The first words of a row in the table -> its workload.
ROWS = {
    "one stream": "W1",
    "8 prompts": "W2",
    "64 requests": "W3",
    "a prompt of 4,096": "W4",
    "16 prompts": "W5",
}


@pytest.mark.parametrize("first", ROWS)
def test_the_readme_shows_what_was_measured(first: str) -> None:
    report = json.loads((RESULTS / "peers.json").read_text())["rows"]
    (line,) = re.findall(rf"^\| {first}.*$", (ROOT / "README.md").read_text(), flags=re.M)
    shown = [float(cell.strip(" *").replace(",", "")) for cell in line.split("|")[2:-1]]
    for engine, figure in zip((OURS, "vllm", "llama.cpp"), shown, strict=True):
        row = best(report, ROWS[first], engine)
        assert row is not None
        measured = (
            row["seconds"]
            if "seconds" in line
            else row[next(rate for rate in RATES if rate in row)]
        )
        assert figure == pytest.approx(measured["median"], rel=0.015), (engine, measured)

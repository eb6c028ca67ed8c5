"""The figures of README's table, and of the pictures, are those of the committed reports."""

import json
import re

import pytest

from benchmarks.measure import RESULTS
from benchmarks.peers.compare import OURS, best
from benchmarks.plots import DIGEST, DRAWN, PICTURES, RATES, digest_of
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


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_show_todays_reports(name: str) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot
    from PIL import Image

    mpl.use("agg")
    path = PICTURES / f"benchmark-{name}.png"
    figure = DRAWN[name](RESULTS)
    if figure is None:
        assert not path.exists()
        return
    shown = digest_of(figure)
    pyplot.close(figure)
    with Image.open(path) as picture:
        assert picture.info.get(DIGEST) == shown, "run python -m benchmarks plots"

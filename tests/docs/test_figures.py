"""The figures in README's table and in the pictures equal those of the committed reports. Terminal
pictures match today's code.
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks.measure import RESULTS
from benchmarks.peers.compare import OURS, best
from benchmarks.plots import DIGEST, DRAWN, PICTURES, RATES, digest_of
from examples import screenshots
from tests.docs.test_docs import ROOT

# First words of a table row -> its workload.
ROWS = {
    "one stream": "W1",
    "8 prompts": "W2",
    "a prompt of 4,096": "W4",
}


@pytest.mark.parametrize("first", ROWS)
def test_readme_shows_the_measured_figures(first: str) -> None:
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


@pytest.mark.parametrize("name", screenshots.PICTURES)
def test_pictures_of_terminals_show_todays_output(name: str) -> None:
    made_of = screenshots.digest_of(screenshots.PICTURES[name])
    assert screenshots.shown_digest(name) == made_of, "run python examples/screenshots.py"


def test_picture_is_stale_when_what_it_shows_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screenshots, "ROOT", tmp_path)
    picture = screenshots.Picture("x", (), (), ("code.py:shown,LIMIT",))

    def digest(code: str) -> str:
        (tmp_path / "code.py").write_text(code)
        return screenshots.digest_of(picture)

    code = 'LIMIT = 3\n\nclass Any:\n    def shown(self):\n        return f"{self} tokens"\n'
    before = digest(code)
    assert digest(code.replace("        return", '        "Why."\n        return')) == before
    assert digest(f"# why\n{code}\ndef other():\n    pass\n") == before
    assert digest(code.replace("tokens", "Tokens")) != before
    assert digest(code.replace("3", "4")) != before
    with pytest.raises(LookupError):
        digest("LIMIT = 3\n")

"""docs/house.md tells the truth: the ways that it describes are traced, and its files are there."""

import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nano_inference"
PAGE = (ROOT / "docs" / "house.md").read_text()
Calls = dict[str, None]  # "file function", in the order of their first calls
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.M)


@contextmanager
def traced() -> Iterator[Calls]:
    """The package's functions that are called in this block, on any thread that starts in it too."""
    calls: Calls = {}

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            name = code.co_qualname.replace("<locals>.", "")
            calls.setdefault(f"{Path(code.co_filename).relative_to(PACKAGE)} {name}")

    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def ways() -> dict[str, Calls]:
    """What a second request, a step that decodes, and an update of one tensor call."""
    found: dict[str, Calls] = {}
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    with InferenceEngine(
        EngineConfig(
            "smollm2-135m",
            device="cpu",
            backend="cpu",
            quantization=None,
            max_model_len=64,
            max_batch_size=2,
        )
    ) as engine:
        engine.generate([1, 2, 3], params)
        with traced() as found["request"]:
            engine.add_request([1, 2, 3], params)
        for _ in range(3):
            engine.step()
        with traced() as found["token"]:
            engine.step()
        with traced() as found["update"]:
            engine.update_weights({"model.norm.weight": torch.ones(576)})
    return found


@pytest.mark.thorough(cases=["request"])
@pytest.mark.parametrize("way", ["request", "token", "update"])
def test_a_way_goes_as_the_page_says(ways: dict[str, Calls], way: str) -> None:
    section = PAGE.split(f'<a id="{way}"></a>')[1].split("<a id=")[0]
    rows: list[Any] = ROW.findall(section)
    assert len(rows) >= 5
    calls = list(ways[way])
    places = []
    for file, function in rows:
        assert f"{file} {function}" in calls, f"{file} {function} is not called"
        places.append(calls.index(f"{file} {function}"))
    assert places == sorted(places), [calls[place] for place in places]


def test_every_file_of_the_page_is_there() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(named) > 20
    roots = (PACKAGE, PACKAGE.parent, ROOT)
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert not missing


def test_the_picture_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_house", ROOT / "docs" / "make_house.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.TARGET.read_text() == made.drawing(), "run python docs/make_house.py"

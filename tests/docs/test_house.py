"""docs/house.md: its files exist, and its four paths equal those of a traced run."""

import importlib.util
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nano_inference"
PAGE = (ROOT / "docs" / "house.md").read_text()
Calls = dict[str, None]  # "file function", in order of the first calls
CONFIG = EngineConfig(
    "smollm2-135m",
    device="cpu",
    backend="cpu",
    quantization=None,
    max_model_len=64,
    max_batch_size=2,
)
ROW = re.compile(r"^\| \[`([\w/]+\.py)`\]\([^)]*\) \| `([\w.]+)` \|", re.M)


class Trace:
    """Records the package's functions called while `noting`, on this thread and on threads started
    afterwards.
    """

    def __init__(self) -> None:
        self._calls: Calls | None = None

    def look(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if (
            self._calls is not None
            and event == "call"
            and code.co_filename.startswith(str(PACKAGE))
        ):
            name = code.co_qualname.replace("<locals>.", "")
            self._calls.setdefault(f"{Path(code.co_filename).relative_to(PACKAGE)} {name}")

    @contextmanager
    def noting(self) -> Iterator[Calls]:
        self._calls = calls = {}
        yield calls
        self._calls = None


@contextmanager
def traced() -> Iterator[Trace]:
    trace, before = Trace(), sys.getprofile()
    threading.setprofile(trace.look)
    sys.setprofile(trace.look)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def ways() -> dict[str, Calls]:
    """Trace a second request, a decode step, an update of one tensor, and a second chat."""
    calls: dict[str, Calls] = {}
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    with traced() as trace, InferenceEngine(CONFIG) as engine:
        engine.generate([1, 2, 3], params)
        with trace.noting() as calls["request"]:
            engine.add_request([1, 2, 3], params)
        for _ in range(3):
            engine.step()
        with trace.noting() as calls["token"]:
            engine.step()
        with trace.noting() as calls["update"]:
            engine.update_weights({"model.norm.weight": torch.ones(576)})
    with traced() as trace, running_server(CONFIG, ServerConfig(port=0, in_process=True)) as url:
        chat(url)
        with trace.noting() as calls["chat"]:
            chat(url)
    return calls


def chat(url: str) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert b"data: " in reply.read()


@pytest.mark.thorough(cases=["request"])
@pytest.mark.parametrize("way", ["request", "token", "update", "chat"])
def test_traced_calls_match_the_page(ways: dict[str, Calls], way: str) -> None:
    section = PAGE.split(f'<a id="{way}"></a>')[1].split("<a id=")[0]
    rows: list[Any] = ROW.findall(section)
    assert len(rows) >= 5
    calls = list(ways[way])
    places = []
    for file, function in rows:
        assert f"{file} {function}" in calls, f"{file} {function} is not called"
        places.append(calls.index(f"{file} {function}"))
    assert places == sorted(places), [calls[place] for place in places]


def test_files_named_by_the_page_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(named) > 20
    roots = (PACKAGE, PACKAGE.parent, ROOT)
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert not missing


def test_picture_and_table_are_current() -> None:
    spec = importlib.util.spec_from_file_location("make_house", ROOT / "docs" / "make_house.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.TARGET.read_text() == made.drawing(), "run python docs/make_house.py"
    assert made.PAGE.read_text() == made.page(), "run python docs/make_house.py"

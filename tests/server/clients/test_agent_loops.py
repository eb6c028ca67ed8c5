"""Agents of pydantic-ai, LangChain, smolagents and Anthropic's client, unmodified, in a separate
environment (`make test-slow` creates it): loops of six turns on a scripted model, and of five forced
calls on a small one.
"""

import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from nano_inference.server.main import running_server
from tests.server.scripted import TEMPLATE, Script, ScriptedClient, calling, with_template

PYTHON = Path(sys.prefix) / "sdks" / "bin" / "python"
SCRIPT = Path(__file__).with_name("with_agent_loops.py")
CITIES = ["Rome", "Oslo", "Lima", "Bern", "Kyiv"]
# client -> its methods
CLIENTS = {
    "anthropic": {"whole", "streamed"},
    "langchain": {"chat", "streamed", "responses", "messages"},
    "pydantic_ai": {"chat", "responses", "messages"},
    "smolagents": {"whole", "streamed"},
}


def outcomes(*arguments: str) -> dict[str, list[str]]:
    ran = subprocess.run(
        [PYTHON, SCRIPT, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
@pytest.mark.parametrize("client", CLIENTS)
def test_loop_of_six_turns_ends_on_a_scripted_model(tmp_path: Path, client: str) -> None:
    turns = calling(("weather", {"city": city}) for city in CITIES)
    final = {"name": "final_answer", "arguments": {"answer": "Done."}}
    answer = f"<tool_call>\n{json.dumps(final)}\n</tool_call>"
    script = cycle([*turns, answer if client == "smolagents" else "Done."])
    engine = ScriptedClient(
        lambda *_: Script(next(script)), tokenizer_folder=with_template(tmp_path, TEMPLATE)
    )
    engine.max_model_len = 1 << 14
    with running_server(engine) as url:
        seen = outcomes(url, "scripted", client, "free")
    assert seen == {way: [*CITIES, "Done."] for way in CLIENTS[client]}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
@pytest.mark.parametrize("client", CLIENTS)
def test_loop_of_five_calls_ends_on_a_small_model(small_model: str, client: str) -> None:
    seen = outcomes(small_model, "smollm2-135m", client, "forced")
    assert set(seen) == CLIENTS[client]
    for way, (*cities, final) in seen.items():
        assert len(cities) == 5, way
        assert set(cities) <= set(CITIES), way
        assert final == "Done.", way

"""Clients of structured output, unmodified, in a separate environment (`make test-slow` creates
it): the objects they parse from a real model's answers are valid.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = Path(sys.prefix) / "sdks" / "bin" / "python"
# client -> its methods
CLIENTS = {
    "dspy": {"json", "chat"},
    "instructor": {"tools", "strict", "schema", "parts", "messages"},
    "litellm_schemas": {"model", "schema", "streamed", "tool", "messages", "messages_tool"},
    "pydantic_ai": {"tool", "schema", "streamed", "messages"},
    "smolagents": {"schema", "tool"},
}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-slow makes it")
@pytest.mark.parametrize("client", CLIENTS)
def test_clients_schemas_give_valid_output(small_model: str, client: str) -> None:
    script = Path(__file__).with_name(f"with_{client}.py")
    local = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # would access the network
    ran = subprocess.run(
        [PYTHON, script, small_model], capture_output=True, text=True, env=local, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    pets = json.loads(ran.stdout.splitlines()[-1])
    assert set(pets) == CLIENTS[client]
    for way, pet in pets.items():
        assert set(pet) == {"kind", "age", "tame"}, way
        assert pet["kind"] in ("cat", "dog"), way
        assert type(pet["age"]) is int, way
        assert 0 <= pet["age"] <= 30, way
        assert type(pet["tame"]) is bool, way

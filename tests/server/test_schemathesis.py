"""What `/openapi.json` says, asked for by a tool that we did not write: no answer is a 5xx, or in
another shape.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from nano_inference.server.paths import CONTROL
from tests.server.scripted import ScriptedClient


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    client = ScriptedClient()
    client.returns |= {"flush_cache": None}
    with running_server(client, ServerConfig(port=0, admin_key="admin", max_samples=8)) as url:
        yield schemathesis.openapi.from_url(url + "/openapi.json")


def check(case: Any) -> None:
    reply = case.call()
    case.validate_response(reply, checks=[not_a_server_error])
    assert reply.headers["request-id"]
    if reply.status_code >= 400:
        assert reply.status_code in (400, 401, 403, 404, 405, 413, 415, 431), reply.text
        body = reply.json()
        trainers = {"error", "success", "message"}
        shapes = (
            [trainers] if case.path in CONTROL else [{"error"}, {"type", "error", "request_id"}]
        )
        assert set(body) in shapes


def play(described: Any, examples: int) -> None:
    """All operations. schemathesis has a plugin for pytest, which does not know pytest 9 yet."""
    quiet = settings(
        max_examples=examples,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    seen: set[str] = set()
    for found in described.get_all_operations():
        operation = found.ok()
        seen.add(operation.label)
        quiet(given(case=operation.as_strategy())(check))()
    assert {
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET /health",
    } <= seen


@pytest.mark.thorough
def test_requests_cause_no_server_error(described: Any) -> None:
    play(described, 15)


@pytest.mark.slow
def test_requests_cause_no_server_error_in_a_long_run(described: Any) -> None:
    play(described, 400)

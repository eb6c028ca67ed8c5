"""Hints to keep what is cached, to a server whose engine has no prefix cache."""

from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference.serving.protocols import anthropic_schema, requests
from nano_inference.serving.protocols.openai_schema import CompletionRequest

MESSAGES = {
    "model": "m",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hi."}],
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}


@pytest.mark.parametrize(("cached", "seconds"), [(True, 3600.0), (False, None)])
def test_a_time_to_live_is_a_hint(cached: bool, seconds: float | None) -> None:
    served: Any = SimpleNamespace(engine=SimpleNamespace(enable_prefix_caching=cached))
    request = anthropic_schema.MessagesRequest.model_validate(MESSAGES)
    assert anthropic_schema.kept_seconds(request, served) == seconds


@pytest.mark.parametrize(("cached", "seconds"), [(True, 86400.0), (False, None)])
def test_a_retention_is_a_hint(cached: bool, seconds: float | None) -> None:
    served: Any = SimpleNamespace(engine=SimpleNamespace(enable_prefix_caching=cached))
    request = CompletionRequest.model_validate({"prompt": "Hi."})
    assert requests.kept_seconds("24h", request, served) == seconds
    assert requests.kept_seconds(None, request, served) is None

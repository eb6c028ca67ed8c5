"""Cache hints to a server whose engine has no prefix cache."""

from types import SimpleNamespace
from typing import Any

import pytest

from nano_inference import SamplingParams
from nano_inference.errors import InvalidRequest
from nano_inference.server.api.anthropic import models as anthropic_models
from nano_inference.server.api.anthropic import request as anthropic_prompt
from nano_inference.server.api.openai.models import CompletionRequest
from nano_inference.server.api.shared import sampling
from nano_inference.server.api.shared.fields import SamplingFields
from nano_inference.server.errors import ApiError

MESSAGES = {
    "model": "m",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hi."}],
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}


def served(cached: bool) -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(
            enable_prefix_caching=cached, vocab_size=300, grammar_backend="plain"
        )
    )


def params(fields: SamplingFields, seconds: float | None, cached: bool) -> SamplingParams:
    hints = sampling.hinted(seconds, served(cached))
    return sampling.sampling_params(fields, served(cached), max_tokens=4, renamed=hints)


@pytest.mark.parametrize(("cached", "kept"), [(True, (3600.0, 3)), (False, (0.0, 0))])
def test_time_to_live_and_its_priority_are_a_hint(cached: bool, kept: Any) -> None:
    request = anthropic_models.MessagesRequest.model_validate(MESSAGES | {"cache_priority": 3})
    found = params(request, anthropic_prompt.kept_seconds(request), cached)
    assert (found.keep_cache_seconds, found.cache_priority) == kept


@pytest.mark.parametrize(("cached", "kept"), [(True, (86400.0, 3)), (False, (0.0, 0))])
def test_retention_and_its_priority_are_a_hint(cached: bool, kept: Any) -> None:
    request = CompletionRequest.model_validate({"prompt": "Hi.", "cache_priority": 3})
    found = params(request, sampling.kept_seconds("24h", request), cached)
    assert (found.keep_cache_seconds, found.cache_priority) == kept
    with pytest.raises(InvalidRequest, match="cache_priority=3 needs keep_cache_seconds"):
        params(request, sampling.kept_seconds("in-memory", request), cached)


def test_engine_parameters_are_not_cache_hints() -> None:
    """Send a parameter that the engine rejects."""
    fields = {"prompt": "Hi.", "keep_cache_seconds": 86400, "cache_priority": 3}
    request = CompletionRequest.model_validate(fields)
    assert params(request, sampling.kept_seconds("24h", request), False).keep_cache_seconds == 86400


@pytest.mark.parametrize(
    ("retention", "seconds", "fits"),
    [
        ("24h", 86400, True),
        ("24h", 5, False),
        ("24h", 0, False),
        ("in-memory", 0, True),
        ("in-memory", 5, False),
        ("in_memory", 86400, False),
    ],
)
def test_retention_and_seconds_say_the_same(retention: Any, seconds: float, fits: bool) -> None:
    fields = {"prompt": "Hi.", "keep_cache_seconds": seconds}
    request = CompletionRequest.model_validate(fields)
    if fits:
        assert sampling.kept_seconds(retention, request) == seconds
        return
    with pytest.raises(ApiError, match="contradict each other"):
        sampling.kept_seconds(retention, request)

"""After a stop token one overrun step is in flight (`lookahead=1`): it blocks no caller and counts
as no work.
"""

from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from tests.models.tiny import tiny_llama


@pytest.fixture
def engine(tmp_path: Path) -> InferenceEngine:
    config = EngineConfig(
        model_path=str(tiny_llama(tmp_path)), device="cpu", lookahead=1, kv_cache_memory=2**22
    )
    return InferenceEngine(config)


def stopped_early(engine: InferenceEngine) -> int:
    """Run one sample that ends by a stop id. Return its number of tokens."""
    free = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[
        0
    ]
    stop = next(token for token in free.completion_tokens if token != free.completion_tokens[0])
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=frozenset([stop])
    )
    before = engine.stats().completion_tokens
    sample = engine.generate([5, 6, 7], params)[0]
    assert sample.finish_reason == "stop"
    assert engine.loop.in_flight, "the overrun step"
    assert engine.stats().completion_tokens - before == len(sample.completion_tokens)
    return len(sample.completion_tokens)


def test_update_after_the_last_sample_is_live_immediately(engine: InferenceEngine) -> None:
    tokens = stopped_early(engine)
    total = engine.stats().completion_tokens
    update = engine.update_weights({"model.norm.weight": engine.model.params["norm"] * 2})
    assert update.done()
    assert update.result(timeout=0) == 1
    assert not engine.has_pending()
    assert engine.stats().completion_tokens == total
    assert tokens > 1


def test_shutdown_leaves_nothing_pending(engine: InferenceEngine) -> None:
    engine.add_request([1, 2], SamplingParams())
    assert engine.has_pending()
    engine.shutdown()
    assert not engine.has_pending()

"""A server of the run's engine: who may ask it, and what it leaves to its owner."""

import asyncio
from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.errors import InvalidRequest
from nano_train.turns import Rollout, RolloutClient
from tests.models.tiny import tiny_llama


def test_client_serves_only_open_rollouts(tmp_path: Path) -> None:
    config = EngineConfig(
        str(tiny_llama(tmp_path / "model")), device="cpu", num_threads=1, kv_cache_memory=2**22
    )
    plain, mine = SamplingParams(), SamplingParams(max_tokens=4, seed=5)

    async def ask(engine: InferenceEngine) -> TrainingSample:
        client = RolloutClient(engine)
        await client.start()
        client.rollouts["open"] = rollout = Rollout(mine)
        for session, count, params, text in (
            ("other", 1, plain, "no open rollout"),
            (None, 1, plain, "no open rollout"),
            ("open", 2, plain, "n=2 must be 1"),
            ("open", 1, SamplingParams(top_k=3), "top_k changes the distribution"),
        ):
            with pytest.raises(InvalidRequest, match=text):
                client.submit([5, 6], params, count, stream=False, session=session)
        turn = client.submit([5, 6], SamplingParams(seed=1), stream=False, session="open")
        await turn.next()
        await client.close()
        (sample,) = rollout.turns
        return sample

    with InferenceEngine(config) as engine:
        sample = asyncio.run(ask(engine))
        (again,) = engine.generate([5, 6], mine)  # the engine lives on, without its server
    assert sample.completion_tokens == again.completion_tokens
    assert sample.logprobs == again.logprobs

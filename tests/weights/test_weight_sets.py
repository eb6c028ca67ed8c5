"""Two weight sets in one engine: every chunk names its set, and neither reads the other's keys."""

from pathlib import Path

import pytest

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample
from nano_inference.checkpoints.loading import load_params
from nano_inference.core.loop import Add
from nano_inference.core.sequence import CheckedRequest, Sequence
from nano_inference.models.decoder import Decoder
from tests.models.tiny import tiny_llama

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(3, 40))


def engine_on(folder: Path) -> InferenceEngine:
    return InferenceEngine(
        EngineConfig(model_path=str(folder), device="cpu", kv_cache_memory=2**22)
    )


def request(engine: InferenceEngine, weight_set: str, request_id: int) -> Add:
    seq_id = engine.loop.sequences.new_id()
    seq = Sequence(
        seq_id,
        CheckedRequest(request_id, len(PROMPT), PARAMS),
        list(PROMPT),
        weight_set=weight_set,
    )
    return Add(seq)


@pytest.mark.thorough
def test_weight_set_computes_its_own_chunks(tmp_path: Path) -> None:
    folders = {
        "policy": tiny_llama(tmp_path / "a", seed=1),
        "other": tiny_llama(tmp_path / "b", seed=2),
    }
    alone: dict[str, TrainingSample] = {}
    for name, folder in folders.items():
        with engine_on(folder) as engine:
            alone[name] = engine.generate(PROMPT, PARAMS)[0]
    assert alone["policy"].completion_tokens != alone["other"].completion_tokens

    with engine_on(folders["policy"]) as engine:
        ops = engine.model.ops
        model = engine.model
        params = load_params(folders["other"], engine.spec, model.dtype, model.device, ops.allocate)
        engine.runner.models["other"] = Decoder(engine.spec, params, ops, engine.max_model_len)
        engine.runner.storages["other"] = engine.runner.storage
        engine.loop.sequences.versions["other"] = 0
        order = ["policy", "other", "other", "policy"]
        engine.loop.inbox.extend(request(engine, name, index) for index, name in enumerate(order))
        samples = []
        while engine.has_pending():
            samples += engine.step()
            engine.loop.check()
        assert engine.stats().prompt_tokens_computed < 4 * len(PROMPT), (
            "twins of one set share their prompt"
        )
    assert len(samples) == len(order)
    for sample in samples:
        expected = alone[order[sample.request_id]]
        assert sample.completion_tokens == expected.completion_tokens
        assert sample.logprobs == expected.logprobs

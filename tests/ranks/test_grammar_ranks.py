"""Grammars in engines of several ranks and in lockstep give the bits of one engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from nano_inference import (
    EngineConfig,
    Grammar,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
    TrainingSample,
)
from nano_inference.rl import score
from tests.models.tiny import tiny_model
from tests.ranks.rank_threads import ThreadLauncher
from tests.ranks.test_lockstep import FAMILY, config_of, lockstep
from tests.structured.vocabularies import with_tokenizer

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.regex("([0-9]{2}-){3}[a-f]+"),
    Grammar.json_schema(PERSON),
    None,
    replace(Grammar.regex("[0-9]{5}"), after="t", opened_by="a"),
    replace(Grammar.choice(["yes", "no", "neither"]), after="t"),
]
THOUGHT = [30, 86, 74, 75, 80, 77, 32]  # "<think>"
PROMPTS = [list(range(3, 3 + length)) for length in (1, 20, 7, 40, 33, 2, 9)]
PROMPTS[2] += THOUGHT


def params_of(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=40,
        seed=index,
        temperature=(1.0, 0.7, 0.0)[index % 3],
        top_p=0.9 if index % 2 else 1.0,
        grammar=GRAMMARS[index % len(GRAMMARS)],
        thinking_token_budget=4 if index == 2 else None,
        bad_words=("1", "23") if index in (1, 2, 5) else (),
    )


PARAMS = [params_of(place) for place in range(len(PROMPTS))]


def outcome(sample: TrainingSample) -> tuple[Any, ...]:
    return (
        sample.sample_index,
        sample.completion_tokens,
        sample.logprobs,
        sample.log_kept_mass,
        sample.finish_reason,
        sample.stop_reason,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    model = tmp_path_factory.mktemp("ranks") / "model"
    # ids beyond the tokenizer, of which ranks hold 101 and 100, or fewer
    tiny_model(model, "llama", num_hidden_layers=2, max_position_embeddings=512, vocab_size=301)
    yield with_tokenizer(model)
    torch.set_num_threads(threads)


def lived(folder: Path, launcher: ThreadLauncher | None, **options: Any) -> list[Any]:
    settled: dict[str, Any] = {
        "device": "cpu",
        "backend": "reference",
        "num_threads": 1,
        "seed": 5,
        "max_chunk_tokens": 11,
        "max_tokens_per_batch": 64,
        "kv_cache_memory": 2**20,
    }
    with InferenceEngine(EngineConfig(str(folder), **(settled | options)), launcher) as engine:
        samples = engine.generate(PROMPTS, PARAMS, 2)
        assert engine.loop.leaked_blocks() == 0
        return [outcome(sample) for sample in samples]


@pytest.mark.thorough(but=["{'pipeline_parallel': 2}"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"tensor_parallel": 2, "lookahead": 0},
        {"tensor_parallel": 2, "pipeline_parallel": 2},
    ],
    ids=str,
)
def test_ranks_follow_grammars_like_one_rank(folder: Path, mesh: dict[str, int]) -> None:
    alone = lived(folder, None)
    assert {each[4] for each in alone} >= {"stop"}
    assert lived(folder, ThreadLauncher(), **mesh) == alone


def test_score_under_a_grammar_is_rejected_on_several_ranks(folder: Path) -> None:
    config = EngineConfig(
        str(folder), device="cpu", num_threads=1, tensor_parallel=2, kv_cache_memory=2**20
    )
    with (
        InferenceEngine(config, ThreadLauncher()) as engine,
        pytest.raises(InvalidRequest, match="under a grammar"),
    ):
        score(engine, [[5, 6, 7]], from_position=1, grammar=Grammar.regex("a+"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_model(tmp_path_factory.mktemp("mixtral"), "mixtral", **FAMILY))


@pytest.mark.thorough(cases=["1"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_lockstep_engines_follow_grammars_like_one_engine(experts: Path, lookahead: int) -> None:
    """Rounds continue while the other engine's grammars are compiled."""
    with InferenceEngine(config_of(experts, lookahead=lookahead)) as engine:
        expected = [outcome(sample) for sample in engine.generate(PROMPTS, PARAMS)]
    with lockstep(experts, lookahead=lookahead) as engines:
        for index, prompt in enumerate(PROMPTS):
            engines.each[index % 2].add_request(prompt, PARAMS[index])
        engines.wait_until(lambda: sum(map(len, engines.samples)) == len(PROMPTS))
        engines.rest()
        for which, samples in enumerate(engines.samples):
            made = sorted(samples, key=lambda sample: sample.request_id)
            assert [outcome(sample) for sample in made] == expected[which::2]

"""Logprobs of alternative target tokens: values, bits and gradients against transformers, PEFT and
scores of the same tokens as continuations.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor

from nano_inference import EngineConfig, Grammar, InferenceEngine, InvalidRequest, SamplingParams
from nano_inference.rl import PolicyModel, score
from tests.depth import at_depth
from tests.models.families import CASES
from tests.models.strong import strong_model, strong_prompts
from tests.models.tiny import tiny_llama
from tests.rl.test_lora_policy import engine_of, strong_policy
from tests.structured.vocabularies import byte_tokenizer

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"cache_type": "radix", "block_size": 4, "max_chunk_tokens": 5, "lookahead": 1},
    {"max_batch_size": 2, "max_tokens_per_batch": 7, "lookahead": 1},
    {"enable_prefix_caching": False, "block_size": 8, "kv_cache_memory": 2**22},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    config = EngineConfig(str(folder), device="cpu", dtype="float32", kv_cache_memory=2**24)
    with InferenceEngine(config) as engine:
        yield engine


def as_continuation(engine: InferenceEngine, ids: list[int], position: int, token: int) -> float:
    """Return the logprob of a token after the first `position` tokens of a sequence."""
    (scores,) = score(engine, [[*ids[:position], token]], from_position=position)
    return float(scores[0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[Any]]:
    """Generate sequences with shared prefixes, start positions, and targets for some of them."""
    token = st.integers(3, 6)
    sequences = draw(st.lists(st.lists(token, min_size=2, max_size=24), min_size=1, max_size=5))
    positions = [draw(st.integers(1, len(ids) - 1)) for ids in sequences]
    targets: list[Any] = []
    for ids, start in zip(sequences, positions, strict=True):
        width = draw(st.sampled_from([None, 0, 1, 2, 3]))
        rows = len(ids) - start
        if width is None:
            targets.append(None)
        elif width == 0:
            targets.append(draw(st.lists(token, min_size=rows, max_size=rows)))
        else:
            row = st.lists(token, min_size=width, max_size=width)
            targets.append(draw(st.lists(row, min_size=rows, max_size=rows)))
    return sequences, positions, targets


@pytest.mark.parametrize("options", SCHEDULES)
def test_targets_equal_continuations_bit_for_bit(folder: Path, options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 2**24}
    with InferenceEngine(EngineConfig(str(folder), **(fields | options))) as engine:

        @settings(max_examples=at_depth(12), deadline=None)
        @given(batches())
        def check(batch: tuple[list[list[int]], list[int], list[Any]]) -> None:
            sequences, positions, targets = batch
            actual = score(engine, sequences, from_position=positions, targets=targets)
            for ids, start, target_ids, scores in zip(
                sequences, positions, targets, actual, strict=True
            ):
                wanted = np.array(ids[start:] if target_ids is None else target_ids)
                assert scores.shape == wanted.shape
                for at in np.ndindex(wanted.shape):
                    token = int(wanted[at])
                    assert float(scores[at]) == as_continuation(engine, ids, start + at[0], token)

        check()


def test_targets_support_temperature_and_the_first_token(engine: InferenceEngine) -> None:
    ids = [3, 4, 5, 6]
    target_ids = [[7, 8], [4, 9], [4, 4], [10, 3]]
    (scores,) = score(engine, [ids], targets=[target_ids], temperature=0.7)
    assert scores.shape == (4, 2)
    assert scores[0].isnan().all()
    for position in range(1, 4):
        for column in range(2):
            tokens = [*ids[:position], target_ids[position][column]]
            (single,) = score(engine, [tokens], from_position=position, temperature=0.7)
            assert float(scores[position, column]) == float(single[0])


def test_equal_targets_are_scored_once(engine: InferenceEngine) -> None:
    """Samples of a group share one prompt and padded targets."""
    prompt = list(range(3, 43))
    group = [[*prompt, 50 + number, 60, 0] for number in range(4)]
    targets = [[0] * (len(prompt) - 1) + [50 + number, 60, 61] for number in range(4)]
    before = engine.stats().tokens_computed
    score(engine, group, from_position=1, targets=targets)
    assert engine.stats().tokens_computed - before < 2 * len(prompt) + 4 * 16


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_gradients_of_targets_equal_peft(tmp_path: Path, family: str) -> None:
    case = CASES[family]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    vocab = oracle.get_input_embeddings().num_embeddings
    sequences = strong_prompts(vocab, (9, 40, 40))
    chance = np.random.default_rng(2)
    # one column, then three with a token twice in a row, and the sequence's tokens
    targets = [chance.integers(0, vocab, 8), chance.integers(0, vocab, (39, 3)), None]
    targets[1][5] = 7
    weights = [
        torch.tensor(chance.normal(size=shape), dtype=torch.float32) for shape in (8, (39, 3), 39)
    ]
    weights[1][:20] = 0.0
    with engine_of(tmp_path, dtype="float32") as engine:
        policy = strong_policy(engine, micro_batch_tokens=32)
        logprobs = policy.logprobs(sequences, from_position=1, targets=targets)
        loss: Any = sum((own * weight).sum() for own, weight in zip(logprobs, weights, strict=True))
        loss.backward()
        policy.save_pretrained(tmp_path / "adapter")
        model = PeftModel.from_pretrained(oracle, tmp_path / "adapter", is_trainable=True).eval()
        for ids, target_ids, weight, scores in zip(
            sequences, targets, weights, logprobs, strict=True
        ):
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)[:-1]
            wanted = torch.tensor(ids[1:] if target_ids is None else target_ids)
            columns = wanted[:, None] if wanted.ndim == 1 else wanted
            theirs = rows.gather(1, columns).view(wanted.shape)
            assert scores.shape == wanted.shape
            assert (scores - theirs).abs().max() < 1e-4
            (theirs * weight).sum().backward()
        expected = {
            name.replace(".default", ""): param.grad
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        for name, param in policy.named_parameters():
            assert param.grad is not None
            difference = (param.grad - expected[name]).norm()
            assert difference < 1e-4 * expected[name].norm(), name


def test_policy_model_has_gradients_of_targets(folder: Path) -> None:
    """A column that repeats the sequence's tokens has the gradient of those tokens."""
    ids = [3, 4, 5, 6, 7, 8]
    results: list[list[Tensor]] = []
    with InferenceEngine(
        EngineConfig(str(folder), device="cpu", dtype="float32", kv_cache_memory=2**24)
    ) as engine:
        for targets, weight in (
            (None, torch.ones(5)),
            ([[[token, 9] for token in ids[1:]]], torch.tensor([[1.0, 0.0]] * 5)),
        ):
            model = PolicyModel(engine)
            (logprobs,) = model.logprobs([ids], from_position=1, targets=targets)
            (logprobs * weight).sum().backward()
            results.append([param.grad for param in model.parameters()])  # pyright: ignore
            model.close()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([[1, 2]], r"dtype int64 and shape \[2\]; pass integers of shape \[3\] or \[3, k\]"),
        ([[1.0, 2.0, 3.0]], "dtype float64 and shape"),
        ([[1, 2, 5000]], r"not in \[0, "),
        ([[1, 2, -1]], r"not in \[0, "),
        ([[[], [], []]], "pass integers"),
        ([np.zeros((3, 0), np.int64)], "have no columns"),
        ([np.zeros((3, 1, 1), np.int64)], "pass integers"),
        ([[[1], [2, 3], [4]]], "pass integers"),
        ([[1, 2, 3], None], "2 targets for 1 sequences"),
    ],
)
def test_bad_targets_are_rejected(engine: InferenceEngine, targets: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        score(engine, [[3, 4, 5, 6]], from_position=1, targets=targets)


def test_targets_and_a_grammar_are_rejected_together(tmp_path: Path) -> None:
    """Another sequence than the one under a grammar may have targets."""
    folder = tiny_llama(tmp_path, seed=0)
    byte_tokenizer(folder)
    grammar = Grammar.regex("[0-9]{4}")
    with engine_of(folder, dtype="float32") as engine:
        (sample,) = engine.generate([[40]], SamplingParams(max_tokens=4, seed=1, grammar=grammar))
        digits = [40, *sample.completion_tokens]
        masked = score(engine, [digits], from_position=1, grammar=grammar)[0]
        both = score(
            engine,
            [[40, 41, 42, 43, 44], digits],
            from_position=1,
            grammar=[None, grammar],
            targets=[[[5, 6]] * 4, None],
        )
        assert both[0].shape == (4, 2)
        assert torch.equal(both[1], masked)
        with pytest.raises(InvalidRequest, match="sequence 0 has both a grammar and targets"):
            score(engine, [digits], from_position=1, grammar=grammar, targets=[[4] * 4])

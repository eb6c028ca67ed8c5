"""Scores, gradients and replays under grammars use the masks and reproduce the bits of sampling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference import Grammar, InferenceEngine, InvalidRequest, SamplingParams, TrainingSample
from nano_inference.rl import PolicyModel, differences, score
from nano_inference.rl.replayer import Replayer
from nano_inference.rl.scoring import check_batch
from nano_inference.structured.mask_bits import may_draw
from tests.models.tiny import tiny_llama
from tests.ops.compiler import NEEDS_COMPILER
from tests.rl.training import bits, build
from tests.structured.vocabularies import EOS, byte_tokenizer
from tests.weights.weight_cases import drain

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": Grammar.regex("[0-9]{4,8}"),
    "json": Grammar.json_schema(PERSON),
    "choice": Grammar.choice(["yes", "no", "nothing"]),
    "after": replace(Grammar.regex("[0-9]{3}"), after="t"),
    "opened": replace(Grammar.regex("[0-9a-z]{3}"), after="t", opened_by="a"),
}
PROMPTS = [list(range(40, 40 + length)) for length in (3, 21)]
BACKENDS = [pytest.param("cpu", marks=NEEDS_COMPILER), "reference"]
CHUNKED: dict[str, Any] = {"cache_type": "radix", "block_size": 4, "max_chunk_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(tmp_path_factory.mktemp("grammar"), seed=0)
    byte_tokenizer(model)
    return model


def whole(sample: TrainingSample) -> list[int]:
    return [*sample.prompt_tokens, *sample.completion_tokens]


def draw(engine: InferenceEngine, temperature: float, grammar: Grammar) -> list[TrainingSample]:
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=5, grammar=grammar)
    return engine.generate(PROMPTS, params, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", [{}, CHUNKED])
def test_grammar_scores_equal_sampled_logprobs_bit_for_bit(
    folder: Path, backend: str, schedule: dict[str, Any]
) -> None:
    with build(folder, backend=backend) as engine:
        drawn = [
            (temperature, grammar, draw(engine, temperature, grammar))
            for temperature in (0.0, 0.7, 1.0)
            for grammar in GRAMMARS.values()
        ]
    with build(folder, backend=backend, **schedule) as engine:
        for temperature, grammar, samples in drawn:
            starts = [len(sample.prompt_tokens) for sample in samples]
            scores = score(
                engine,
                map(whole, samples),
                from_position=starts,
                temperature=temperature,
                grammar=grammar,
            )
            for sample, scored in zip(samples, scores, strict=True):
                assert bits(scored) == bits(torch.tensor(sample.logprobs)), (temperature, grammar)
        engine.loop.check()
        assert engine.cache.num_free_blocks() == engine.cache.num_blocks


def test_sequences_with_different_grammars_share_a_prefix(folder: Path) -> None:
    """Score the same tokens under two grammars, from two positions, and next to unconstrained
    sequences.
    """
    with build(folder) as engine:
        grammars = [Grammar.regex("[0-9]{4,8}"), Grammar.regex("[0-9a-f]{2,9}"), None]
        sample = draw(engine, 1.0, GRAMMARS["regex"])[0]
        ids, start = whole(sample), len(sample.prompt_tokens)
        cases = [(grammar, at) for grammar in grammars for at in (start, start + 1)]
        cases = [
            (grammar, at) for grammar, at in cases if grammar is not grammars[0] or at == start
        ]
        cases += cases[:2]
        apart = [
            score(engine, [ids], from_position=at, grammar=grammar)[0] for grammar, at in cases
        ]
        together = score(
            engine,
            [ids] * len(cases),
            from_position=[at for _, at in cases],
            grammar=[grammar for grammar, _ in cases],
        )
        assert [bits(each) for each in together] == [bits(each) for each in apart]
        assert bits(apart[0]) == bits(torch.tensor(sample.logprobs))
        assert len({tuple(bits(each)) for each in apart}) == len(cases) - 2


def test_grammar_may_begin_at_the_first_token(folder: Path) -> None:
    with build(folder) as engine:
        ids = [*engine.tokenizer.encode("1234"), EOS]
        (scored,) = score(engine, [ids], grammar=GRAMMARS["regex"])
        assert scored[0].isnan()
        assert not scored[1:].isnan().any()
        (free,) = score(engine, [ids])
        assert (scored[1:] > free[1:]).all()


@pytest.mark.parametrize(
    ("text", "ends", "reason"),
    [
        ("12a4", True, "token .* at position 2 of sequence 0 is not in its grammar"),
        ("12", True, "token 2 at position 2 of sequence 0 is not in its grammar"),
        ("123456789", False, "at position 8 of sequence 0 is not in its grammar"),
    ],
)
def test_tokens_outside_the_grammar_are_named(
    folder: Path, text: str, ends: bool, reason: str
) -> None:
    with build(folder) as engine:
        model = PolicyModel(engine)
        ids = [*engine.tokenizer.encode(text), *([EOS] if ends else [])]
        for temperature in (0.0, 1.0):
            for logprobs in (model.logprobs, lambda *a, **b: score(engine, *a, **b)):
                with pytest.raises(InvalidRequest, match=reason):
                    logprobs([ids], grammar=GRAMMARS["regex"], temperature=temperature)
        ids = [*engine.tokenizer.encode("1234"), EOS, 40]
        with pytest.raises(InvalidRequest, match=r"position 5 .* after the end of its grammar"):
            score(engine, [ids], grammar=GRAMMARS["regex"])


def test_bad_grammars_are_rejected(folder: Path) -> None:
    with build(folder) as engine:
        bad: list[tuple[Any, str]] = [
            ("[0-9]", "must be a Grammar"),
            (7, "must be a Grammar"),
            ([GRAMMARS["regex"]], "1 grammars for 2 sequences"),
            (Grammar.regex("(?=x)y"), "regex"),
        ]
        for grammar, reason in bad:
            with pytest.raises(InvalidRequest, match=reason):
                score(engine, [[5, 6], [7, 8]], from_position=1, grammar=grammar)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_policy_model_matches_the_engine_after_every_step(folder: Path, backend: str) -> None:
    with build(folder, backend=backend) as engine:
        model = PolicyModel(engine, micro_batch_tokens=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            samples = [
                (grammar, sample)
                for grammar in GRAMMARS.values()
                for sample in draw(engine, 0.8, grammar)
            ]
            logprobs = model(
                [whole(sample) for _, sample in samples],
                from_position=[len(sample.prompt_tokens) for _, sample in samples],
                temperature=0.8,
                grammar=[grammar for grammar, _ in samples],
            )
            for (_, sample), computed in zip(samples, logprobs, strict=True):
                assert bits(computed) == bits(torch.tensor(sample.logprobs))
            optimizer.zero_grad()
            torch.cat(logprobs).mean().neg().backward()
            optimizer.step()
            model.publish()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_autograd_on_masked_logits(folder: Path, backend: str) -> None:
    """Cover a row scored under two masks, with gradients from the kernels and from torch."""
    from transformers import AutoModelForCausalLM

    oracle: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    digits = [Grammar.regex("[0-9]{4,8}"), Grammar.regex("[0-9a-f]{4,8}")]
    with build(folder, backend=backend) as engine:
        model = PolicyModel(engine, micro_batch_tokens=64)
        assert model.gradients == ("torch" if backend == "reference" else "kernels")
        ids = [*PROMPTS[0], *engine.tokenizer.encode("12345"), EOS]
        other = [*PROMPTS[0], *engine.tokenizer.encode("12ab6"), EOS]
        sequences, grammars = [ids, ids, other, ids], [digits[0], digits[1], digits[1], None]
        start = len(PROMPTS[0])
        logprobs = model.logprobs(sequences, from_position=start, temperature=0.7, grammar=grammars)
        weights = torch.randn(4, len(ids) - start, generator=torch.Generator().manual_seed(1))
        (torch.stack(logprobs) * weights).sum().backward()
        masks = check_batch(engine, sequences, start, 0.7, grammars).masks
    loss = torch.zeros(())
    for sequence, scored, factors, masked in zip(sequences, logprobs, weights, masks, strict=True):
        logits = oracle(torch.tensor([sequence])).logits[0, start - 1 : -1].float()
        if masked is not None:
            cut = [
                [not may_draw(words, token) for token in range(logits.shape[1])]
                for words in masked.words
            ]
            logits = logits.masked_fill(torch.tensor(cut), -torch.inf)
        expected = (logits / 0.7).log_softmax(dim=-1)
        expected = expected.gather(1, torch.tensor(sequence[start:])[:, None])[:, 0]
        assert torch.allclose(expected, scored, atol=1e-4)
        loss = loss + (expected * factors).sum()
    loss.backward()
    theirs = {name: param.grad for name, param in oracle.named_parameters()}
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert float((param.grad - theirs[name]).norm() / theirs[name].norm()) < 1e-4, name


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_under_grammars_are_replayed(folder: Path, backend: str) -> None:
    with build(folder, backend=backend, max_chunk_tokens=7) as engine:
        samples = [
            sample
            for temperature in (0.0, 1.0)
            for grammar in GRAMMARS.values()
            for sample in draw(engine, temperature, grammar)
        ]
        more: list[dict[str, Any]] = [
            {"ignore_eos": True},
            {"min_tokens": 7},
            {"min_tokens": 20},
            {"allowed_token_ids": frozenset([EOS, *engine.tokenizer.encode("01234")])},
        ]
        for options in more:
            params = SamplingParams(
                max_tokens=30, seed=3, grammar=GRAMMARS["regex"], raw_logprobs=True, **options
            )
            samples += engine.generate(PROMPTS, params)
        engine.resume_from(samples[-1], append=[40, 41], max_new_tokens=9)
        samples += drain(engine)
        replayer = Replayer(engine)
        for sample in samples:
            assert differences(sample, replayer.replay(sample)) == ()
        sample = samples[20]  # JSON at temperature 1
        tokens = [*sample.completion_tokens[:2], 40, *sample.completion_tokens[3:]]
        changed = replace(sample, completion_tokens=tuple(tokens))
        again = replayer.replay(changed)
        assert again.completion_tokens == sample.completion_tokens
        assert again.logprobs == sample.logprobs
        assert differences(changed, again)[0].token == 2

"""Drafts by heads on the policy's own hidden rows: Medusa."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nano_inference import ConfigError, InvalidRequest, SamplingParams
from nano_inference.engine.medusa import MedusaDrafts
from nano_inference.models.draft_heads import HeadWeights
from nano_inference.speculation.drafter import Drafter
from tests.models.tiny import tiny_llama
from tests.speculation.heads import medusa_of_its_authors, medusa_of_vllm, write_heads
from tests.speculation.test_model_drafts import CASES, PROMPTS, bits, drafts_of, engine_of
from tests.structured.vocabularies import with_tokenizer

FORMATS: dict[str, Any] = {
    "vllm": medusa_of_vllm(),
    "vllm, few tokens": medusa_of_vllm(known=40),
    "authors": medusa_of_its_authors(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("policy")))


def by_hand(tensors: dict[str, Tensor], head: int, row: Tensor) -> int:
    """The most probable token of a Medusa head behind a row [H], by its authors' formula."""
    authors = "0.0.linear.weight" in tensors
    if authors:
        blocks = [(tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"])]
        projection = tensors[f"{head}.1.weight"]
    else:
        names = [f"medusa_heads.blocks.{head}.layers.{block}.weight" for block in range(2)]
        blocks = [(tensors[name], None) for name in names]
        projection = tensors[f"medusa_heads.lm_heads.{head}.weight"]
    for weight, bias in blocks:
        row = row + functional.silu(functional.linear(row, weight, bias))
    best = int((projection @ row).argmax())
    return int(tensors["token_map"][best]) if "token_map" in tensors else best


@pytest.mark.parametrize("form", FORMATS)
def test_medusa_heads_guess_what_their_formula_says(
    model: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders as others write them; greedy, so that a guess is the most probable token."""
    config, tensors = FORMATS[form]
    folder = write_heads(tmp_path / "heads", config, tensors)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params)
    compared = 0
    with engine_of(model, draft_model=str(folder)) as engine:
        assert isinstance(engine.drafter, Drafter)
        source = engine.drafter.model
        assert isinstance(source, MedusaDrafts)
        propose = source.propose

        def checked(seqs: Any, most: int) -> Any:
            nonlocal compared
            guesses = propose(seqs, most)
            for seq, guess in zip(seqs, guesses, strict=True):
                row = source._rows.of(seq, len(seq.token_ids) - 1)
                assert row is not None
                expected = [by_hand(tensors, head, row) for head in range(len(guess.token_ids))]
                assert list(guess.token_ids) == expected
                compared += len(expected)
            return guesses

        monkeypatch.setattr(source, "propose", checked)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert drafts_of(engine, "medusa")[0] > 20
    assert compared > 60


@pytest.mark.parametrize("case", CASES)
def test_no_bit_depends_on_random_heads(model: Path, tmp_path: Path, case: str) -> None:
    folder = write_heads(tmp_path / "heads", *medusa_of_vllm())
    params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "seed": 5} | CASES[case]))
    tight = {"kv_cache_memory": 2**17, "block_size": 4}
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params, 3)
    for cache_type in ("paged", "radix"):
        with engine_of(model, draft_model=str(folder), cache_type=cache_type, **tight) as engine:
            assert bits(engine.generate(PROMPTS, params, 3)) == bits(plain)
            assert drafts_of(engine, "medusa")[0] > 20
            assert engine.stats().num_preemptions > 0 or case == "grammar"
            engine.loop.check()


def test_heads_that_know_the_text_are_right(model: Path, tmp_path: Path) -> None:
    """Every head's projection is such that it says token 9, which alone may be drawn."""
    config, tensors = medusa_of_vllm()
    for name in tensors:
        tensors[name] = torch.zeros_like(tensors[name])
    folder = write_heads(tmp_path / "heads", config, tensors)
    params = SamplingParams(max_tokens=30, ignore_eos=True, allowed_token_ids=(9,))
    with engine_of(model, draft_model=str(folder), max_drafts=3) as engine:
        engine.generate(PROMPTS, params)
        drafted, drawn = drafts_of(engine, "medusa")
        assert drawn == drafted > 30
        assert engine.stats().num_steps < 15


def test_new_weights_of_the_heads_draft_from_the_next_step_on(model: Path, tmp_path: Path) -> None:
    config, tensors = medusa_of_vllm()
    folder = write_heads(tmp_path / "heads", config, tensors)
    with engine_of(model, draft_model=str(folder)) as engine:
        heads = engine._draft_heads
        assert isinstance(heads, HeadWeights)
        name = "medusa_heads.lm_heads.1.weight"
        engine.update_draft({name: tensors[name] * 2})
        kept = heads.params["lm_heads.1.weight"]
        assert torch.equal(kept.read(), tensors[name] * 2)
        engine.update_draft(str(folder))
        assert torch.equal(kept.read(), tensors[name])
        with pytest.raises(ConfigError, match=r"'fc.weight' of shape \(3, 4\) is not part of them"):
            engine.update_draft({name: tensors[name] * 3, "fc.weight": torch.zeros(3, 4)})
        assert torch.equal(kept.read(), tensors[name])
    with engine_of(model) as engine, pytest.raises(InvalidRequest, match="names no heads"):
        engine.update_draft({})


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: each for key, each in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 128}, "has hidden_size=128, and the policy 64"),
        ({"vocab_size": 400}, "has vocab_size=400, and the policy 300"),
        ({"num_heads": 4}, r"tensor 'blocks.3.layers.0.weight' is missing"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": "many"}, "wrong kind"),
        ({"truncated_vocab_size": 40}, "has shape"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    config, tensors = medusa_of_vllm()
    folder = write_heads(tmp_path / "heads", config | change, tensors)
    with pytest.raises(ConfigError, match=reason):
        engine_of(model, draft_model=str(folder))


def test_a_vocabulary_of_their_own_needs_its_map(model: Path, tmp_path: Path) -> None:
    config, tensors = medusa_of_vllm(known=40)
    folder = write_heads(tmp_path / "a", config, without(tensors, "token_map"))
    with pytest.raises(ConfigError, match="the map of their vocabulary, is missing"):
        engine_of(model, draft_model=str(folder))
    tensors["token_map"][3] = 300
    folder = write_heads(tmp_path / "b", config, tensors)
    with pytest.raises(ConfigError, match="names token 300 of 300"):
        engine_of(model, draft_model=str(folder))


def test_heads_run_on_one_rank(model: Path, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "heads", *medusa_of_vllm())
    with pytest.raises(ConfigError, match="runs on one rank"):
        engine_of(model, draft_model=str(folder), tensor_parallel=2)

"""Draft heads on the policy's hidden rows: Medusa and EAGLE-3."""

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nano_inference import ConfigError, InvalidRequest, SamplingParams
from nano_inference.arrays import as_torch
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.eagle import EagleDrafts
from nano_inference.drafts.heads import HeadWeights
from nano_inference.drafts.medusa import MedusaDrafts
from tests.drafts.heads import (
    eagle_of_sglang,
    eagle_of_speculators,
    medusa_of_its_authors,
    medusa_of_vllm,
    write_heads,
)
from tests.drafts.test_model_drafts import CASES, PROMPTS, bits, drafts_of, engine_of
from tests.models.tiny import tiny_llama
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
    """Return the most probable token of a Medusa head for a row [H], by its authors' formula."""
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
def test_medusa_heads_match_their_formula(
    model: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load folders in other projects' formats. Sampling is greedy, so a draft is the most probable
    token.
    """
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
                expected = [
                    by_hand(tensors, head, as_torch(row)) for head in range(len(guess.token_ids))
                ]
                assert list(guess.token_ids) == expected
                compared += len(expected)
            return guesses

        monkeypatch.setattr(source, "propose", checked)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert drafts_of(engine, "medusa")[0] > 20
    assert compared > 60


def check_no_bit_depends(model: Path, folder: Path, case: str, kind: str, memory: int) -> None:
    """Check heads of a folder with barely enough memory."""
    params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "seed": 5} | CASES[case]))
    tight = {"kv_cache_memory": memory, "block_size": 4}
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params, 3)
    for cache_type in ("paged", "radix"):
        with engine_of(model, draft_model=str(folder), cache_type=cache_type, **tight) as engine:
            assert bits(engine.generate(PROMPTS, params, 3)) == bits(plain)
            assert drafts_of(engine, kind)[0] > 20
            assert engine.stats().num_preemptions > 0 or case == "grammar"
            engine.loop.check()


@pytest.mark.thorough(but=["plain", "grammar"])
@pytest.mark.parametrize("case", CASES)
def test_random_heads_change_no_bit(model: Path, tmp_path: Path, case: str) -> None:
    folder = write_heads(tmp_path / "heads", *medusa_of_vllm())
    check_no_bit_depends(model, folder, case, "medusa", 2**17)


def test_heads_fitted_to_the_text_are_accepted(model: Path, tmp_path: Path) -> None:
    """Every head's projection predicts token 9, the only token that may be sampled."""
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
        heads = engine._draft_weights
        assert isinstance(heads, HeadWeights)
        name = "medusa_heads.lm_heads.1.weight"
        engine.update_draft({name: tensors[name] * 2})
        kept = heads.params["lm_heads.1.weight"]
        assert torch.equal(as_torch(kept.read()), tensors[name] * 2)
        engine.update_draft(str(folder))
        assert torch.equal(as_torch(kept.read()), tensors[name])
        with pytest.raises(ConfigError, match=r"'fc.weight' of shape \(3, 4\) is unknown"):
            engine.update_draft({name: tensors[name] * 3, "fc.weight": torch.zeros(3, 4)})
        assert torch.equal(as_torch(kept.read()), tensors[name])
    with (
        engine_of(model) as engine,
        pytest.raises(InvalidRequest, match="does not name draft heads"),
    ):
        engine.update_draft({})


class EagleByHand:
    """An EAGLE-3 head over a whole sequence, without a cache, on hidden rows of transformers.

    Rows of positions 0 to n - 2, followed by rows of drafts.
    """

    def __init__(self, model: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        self.policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        named = {name.replace("midlayer", "layers.0"): each for name, each in tensors.items()}
        self.config, self.tensors = config, named
        self.layer = config.get("transformer_layer_config", config)
        nested = config.get("eagle_config")
        layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
        behind = nested["eagle_aux_hidden_state_layer_ids"] if nested else []
        self.before = layer_ids if layer_ids else [each + 1 for each in behind]

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.layer.get("rms_norm_eps", 1e-6)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[name]

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate [heads, N, D] by positions 0 to N - 1."""
        size = x.shape[-1]
        frequency = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(x.shape[1])[:, None] * frequency
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos + half * sin

    @torch.no_grad()
    def guess(self, token_ids: list[int], count: int, allowed: list[int]) -> list[int]:
        """Return the most probable allowed next tokens, one after the other."""
        computed = self.policy(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
        parts = [computed.hidden_states[layer][0] for layer in self.before]
        if self.config.get("fc_norm"):
            parts = [self.norm(each, f"fc_norm.{i}.weight") for i, each in enumerate(parts)]
        hidden = torch.cat(parts, -1) @ self.tensors["fc.weight"].T
        behind, drafts = list(token_ids[1:]), []
        draft_embeddings = self.tensors.get("embed_tokens.weight")
        embedding = (
            self.policy.get_input_embeddings().weight
            if draft_embeddings is None
            else draft_embeddings
        )
        for _ in range(count):
            out = self.row(hidden, embedding[torch.tensor(behind)])
            normed = self.norm(out, "norm.weight")
            known = torch.arange(len(self.tensors["lm_head.weight"]))
            known = known + self.tensors["d2t"] if "d2t" in self.tensors else known
            logits = torch.full((300,), -1e30)
            logits[known] = self.tensors["lm_head.weight"] @ normed
            best = max(allowed, key=lambda token: float(logits[token]))
            drafts.append(best)
            behind.append(best)
            following = normed if self.config.get("norm_output") else out
            hidden = torch.cat([hidden, following[None]])
        return drafts

    def row(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the layer's output at the last position."""
        t = self.tensors
        normed = self.norm(hidden, "layers.0.hidden_norm.weight")
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = torch.cat([self.norm(embedded, "layers.0.input_layernorm.weight"), normed], -1)
        q, k, v = (
            (x @ t[f"layers.0.self_attn.{each}_proj.weight"].T).view(len(x), -1, 16).transpose(0, 1)
            for each in "qkv"
        )
        q, k, v = self.rotated(q)[:, -1:], self.rotated(k).repeat_interleave(2, 0), v
        weights = (q @ k.transpose(1, 2) / 4.0).softmax(-1)
        attended = (weights @ v.repeat_interleave(2, 0)).flatten()
        row = residual[-1] + t["layers.0.self_attn.o_proj.weight"] @ attended
        normed = self.norm(row, "layers.0.post_attention_layernorm.weight")
        gate, up = (t[f"layers.0.mlp.{each}_proj.weight"] @ normed for each in ("gate", "up"))
        return row + t["layers.0.mlp.down_proj.weight"] @ (functional.silu(gate) * up)


EAGLES = {"sglang": eagle_of_sglang(), "speculators": eagle_of_speculators()}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("deep"), layers=5))


@pytest.mark.thorough(but=["sglang-options0"])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("sglang", {}),
        ("speculators", {"block_size": 4, "max_chunk_tokens": 8}),
        ("sglang", {"backend": "reference", "block_size": 4}),
    ],
)
def test_eagle_head_matches_its_formula(
    deep: Path, tmp_path: Path, form: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers chunked prompts, prefix cache hits, and rows after accepted drafts, which are frequent
    because few tokens are allowed.
    """
    config, tensors = EAGLES[form]
    folder = write_heads(tmp_path / "heads", config, tensors)
    by_hand = EagleByHand(deep, config, tensors)
    known = EAGLES["sglang"][1]["t2d"].nonzero()[:, 0]
    few = known[10:13].tolist()
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, allowed_token_ids=few)
    with engine_of(deep, **options) as engine:
        plain = engine.generate(PROMPTS, params)
    right = compared = 0
    with engine_of(deep, draft_model=str(folder), max_drafts=3, **options) as engine:
        assert isinstance(engine.drafter, Drafter)
        source = engine.drafter.model
        assert isinstance(source, EagleDrafts)
        propose = source.propose

        def checked(seqs: Any, most: int) -> Any:
            nonlocal compared, right
            guesses = propose(seqs, most)
            for seq, guess in zip(seqs, guesses, strict=True):
                expected = by_hand.guess(seq.token_ids, len(guess.token_ids), few)
                right += sum(map(operator.eq, guess.token_ids, expected))
                compared += len(expected)
            return guesses

        monkeypatch.setattr(source, "propose", checked)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)  # on cached prefixes
        assert drafts_of(engine, "eagle")[1] > 10
    assert right == compared > 60


@pytest.mark.thorough(but=["grammar"])
@pytest.mark.parametrize("case", CASES)
def test_random_eagle_head_changes_no_bit(deep: Path, tmp_path: Path, case: str) -> None:
    folder = write_heads(tmp_path / "heads", *eagle_of_sglang())
    check_no_bit_depends(deep, folder, case, "eagle", 2**18)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 128}, "has target_hidden_size=128, but the policy has 64"),
        ({"vocab_size": 400}, "has vocab_size=400, but the policy has 300"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"draft_vocab_size": 70}, r"has shape \(80, 64\), expected \(70, 64\)"),
        ({"num_key_value_heads": 4}, r"tensor 'layers.0.self_attn.k_proj.weight' has shape"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, r"reads layers \(1, 2, 5\)"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"eagle_config": "none"}, "wrong type"),
    ],
)
def test_mismatched_eagle_head_is_rejected(
    deep: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    config, tensors = eagle_of_sglang()
    folder = write_heads(tmp_path / "heads", config | change, tensors)
    with pytest.raises(ConfigError, match=reason) as refused:
        engine_of(deep, draft_model=str(folder))
    assert str(refused.value).count("draft_model: ") == 1


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: each for key, each in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 128}, "has hidden_size=128, but the policy has 64"),
        ({"vocab_size": 400}, "has vocab_size=400, but the policy has 300"),
        ({"num_heads": 4}, r"tensor 'blocks.3.layers.0.weight' is missing"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": "many"}, "wrong type"),
        ({"medusa_num_layers": "many"}, "wrong type"),
        ({"truncated_vocab_size": 40}, "has shape"),
    ],
)
def test_mismatched_medusa_heads_are_rejected(
    model: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    config, tensors = medusa_of_vllm()
    folder = write_heads(tmp_path / "heads", config | change, tensors)
    with pytest.raises(ConfigError, match=reason) as refused:
        engine_of(model, draft_model=str(folder))
    assert str(refused.value).count("draft_model: ") == 1


def test_heads_of_an_integer_dtype_are_rejected(model: Path, tmp_path: Path) -> None:
    config, tensors = medusa_of_vllm()
    name = "medusa_heads.lm_heads.1.weight"
    codes = tensors | {name: tensors[name].to(torch.int8)}
    folder = write_heads(tmp_path / "heads", config, codes)
    with pytest.raises(ConfigError, match=rf"'{name}' has dtype int8"):
        engine_of(model, draft_model=str(folder))


def test_draft_vocabulary_needs_its_map(model: Path, tmp_path: Path) -> None:
    config, tensors = medusa_of_vllm(known=40)
    folder = write_heads(tmp_path / "a", config, without(tensors, "token_map"))
    with pytest.raises(ConfigError, match=r"\(the vocabulary map\) is missing"):
        engine_of(model, draft_model=str(folder))
    tensors["token_map"][3] = 300
    folder = write_heads(tmp_path / "b", config, tensors)
    with pytest.raises(ConfigError, match="has token 300, but the policy has only 300 tokens"):
        engine_of(model, draft_model=str(folder))


def test_heads_run_on_one_rank(model: Path, tmp_path: Path) -> None:
    folder = write_heads(tmp_path / "heads", *medusa_of_vllm())
    with pytest.raises(ConfigError, match="runs on one rank"):
        engine_of(model, draft_model=str(folder), tensor_parallel=2)

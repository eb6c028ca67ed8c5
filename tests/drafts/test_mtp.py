"""Drafts by the multi-token prediction layer of the policy's own checkpoint."""

import operator
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import ConfigError, SamplingParams
from nano_inference.arrays import as_torch
from nano_inference.drafts.drafter import Drafter
from nano_inference.drafts.mtp import MtpDrafts
from nano_inference.errors import ModelLoadError, WeightUpdateError
from nano_inference.models.parameters.storage import form_of
from tests.drafts.mtp import FAMILIES, MtpModel
from tests.drafts.test_model_drafts import CASES, PROMPTS, bits, drafts_of, engine_of
from tests.models.tiny import tiny_model
from tests.structured.vocabularies import with_tokenizer

TOLERANCE = 1e-4  # on a normed row, relative to its largest number
FEW = [17, 40, 41]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpModel:
    return MtpModel(tmp_path_factory.mktemp("mtp"), FAMILIES[request.param])


def source_of(engine: Any) -> MtpDrafts:
    assert isinstance(engine.drafter, Drafter)
    assert isinstance(engine.drafter.model, MtpDrafts)
    return engine.drafter.model


def best_of_few(logits: Tensor) -> int:
    return max(FEW, key=lambda token: float(logits[token]))


@pytest.mark.thorough(but=["qwen3.5-cpu", "mimo-cpu", "deepseek-v3-cpu"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_mtp_layer_matches_its_formula(
    model: MtpModel, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers chunked prompts, prefix cache hits, and rows after accepted drafts, which are frequent
    because few tokens are allowed.
    """
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, allowed_token_ids=FEW)
    options: dict[str, Any] = {"backend": backend, "block_size": 4, "max_chunk_tokens": 8}
    with engine_of(model.folder, **options) as engine:
        plain = engine.generate(PROMPTS, params)
    worst, compared, right, drawn = 0.0, 0, 0, list[Tensor]()
    with engine_of(model.folder, draft_model="mtp", max_drafts=3, **options) as engine:
        source = source_of(engine)
        propose, draw = source.propose, source.draw

        def kept(rows: Any, batch: Any) -> Any:
            drawn.append(as_torch(rows).clone())
            return draw(rows, batch)

        def checked(seqs: Any, most: int) -> Any:
            nonlocal worst, compared, right
            drawn.clear()
            guesses = propose(seqs, most)
            lengths = [len(guess.token_ids) for guess in guesses]
            for which, (seq, guess) in enumerate(zip(seqs, guesses, strict=True)):
                tokens = list(guess.token_ids)
                expected = model.rows(seq.token_ids, best_of_few, lengths[which])
                for step, row in enumerate(expected):
                    among = sum(length > step for length in lengths[:which])
                    difference = (drawn[step][among] - row).abs().max() / row.abs().max()
                    worst = max(worst, float(difference))
                right += sum(
                    map(operator.eq, tokens, map(best_of_few, map(model.logits, expected)))
                )
                compared += len(tokens)
            return guesses

        monkeypatch.setattr(source, "propose", checked)
        monkeypatch.setattr(source, "draw", kept)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)
        assert bits(engine.generate(PROMPTS, params)) == bits(plain)  # on cached prefixes
        assert drafts_of(engine, "mtp")[1] > 5
        engine.loop.check()
    assert right == compared > 40
    assert worst < TOLERANCE


@pytest.mark.thorough(but=[f"{name}-1.0-4" for name in FAMILIES])
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mtp_drafts_change_no_bit(model: MtpModel, temperature: float, most: int) -> None:
    """Samples of a prompt are forks, and the second call finds the prompts in the cache."""
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 4}
    with engine_of(model.folder, **options) as engine:
        plain = [bits(engine.generate(PROMPTS, params, 3)) for _ in range(2)]
    for cache_type in ("paged", "radix"):
        drafting = {"draft_model": "mtp", "max_drafts": most, "cache_type": cache_type}
        with engine_of(model.folder, **options, **drafting) as engine:
            assert [bits(engine.generate(PROMPTS, params, 3)) for _ in range(2)] == plain
            assert drafts_of(engine, "mtp")[0] > 20
            engine.loop.check()


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> MtpModel:
    return MtpModel(tmp_path_factory.mktemp("mimo"), FAMILIES["mimo"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MtpModel:
    return MtpModel(tmp_path_factory.mktemp("qwen"), FAMILIES["qwen3.5"])


@pytest.mark.thorough(but=["plain", "grammar"])
@pytest.mark.parametrize("case", CASES)
def test_mtp_drafts_survive_preemption(mimo: MtpModel, tmp_path: Path, case: str) -> None:
    """Every kind of parameter, with barely enough memory."""
    folder = with_tokenizer(copied(mimo.folder, tmp_path))
    params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "seed": 5} | CASES[case]))
    tight = {"kv_cache_memory": 2**18, "block_size": 4}
    with engine_of(folder) as engine:
        plain = bits(engine.generate(PROMPTS, params, 3))
    with engine_of(folder, draft_model="mtp", **tight) as engine:
        assert bits(engine.generate(PROMPTS, params, 3)) == plain
        assert drafts_of(engine, "mtp")[0] > 20
        assert engine.stats().num_preemptions > 0 or case == "grammar"
        engine.loop.check()


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def of_one_token(model: MtpModel) -> dict[str, Tensor]:
    """Return weights of a policy and its predicting layer that both read only the last token.

    All layers add nothing, and the product keeps the embedding alone. Both then norm the same
    embedding, so they draw the same token.
    """
    stored = load_file(model.folder / "model.safetensors")
    ends = ("o_proj.weight", "down_proj.weight")
    zeros = {name: torch.zeros_like(each) for name, each in stored.items() if name.endswith(ends)}
    embed_norm, _, product, last_norm = model.family.names
    none, keep = torch.zeros(64, 64), torch.eye(64)
    return zeros | {
        embed_norm: torch.ones(64),
        product: torch.cat([none, keep] if model.family.hidden_first else [keep, none], 1),
        last_norm: stored["model.norm.weight"],
    }


@pytest.mark.parametrize("complete", [False, True])
def test_mtp_layer_follows_weight_updates(mimo: MtpModel, tmp_path: Path, complete: bool) -> None:
    """After an update from a folder, the layer draws what the policy draws."""
    stored = load_file(mimo.folder / "model.safetensors")
    folder = copied(mimo.folder, tmp_path)
    new = of_one_token(mimo) if not complete else stored | of_one_token(mimo)
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    with engine_of(mimo.folder) as engine:
        engine.update_weights(str(folder), blocking=True)
        plain = bits(engine.generate(PROMPTS, params, 2))
        steps = engine.stats().num_steps
    with engine_of(mimo.folder, draft_model="mtp", max_drafts=3) as engine:
        engine.generate(PROMPTS, params)
        before, first = drafts_of(engine, "mtp"), engine.stats().num_steps
        assert before[1] < 0.3 * before[0]
        engine.update_weights(str(folder), blocking=True, complete=complete)
        assert bits(engine.generate(PROMPTS, params, 2)) == plain
        now = drafts_of(engine, "mtp")
        assert now[1] - before[1] > 0.95 * (now[0] - before[0]) > 50
        assert engine.stats().num_steps - first < 0.5 * steps


def test_complete_update_may_omit_the_mtp_layer(mimo: MtpModel) -> None:
    """Trainers often do not hold this layer. The engine then keeps the old one."""
    stored = load_file(mimo.folder / "model.safetensors")
    policy = {name: each * 1.5 for name, each in stored.items() if "mtp" not in name}
    product = mimo.family.names[2]
    with engine_of(mimo.folder, draft_model="mtp") as engine:
        engine.update_weights(policy, blocking=True, complete=True)
        state = engine.weight_sync.weights
        assert torch.equal(as_torch(state.tensor(product)), stored[product])
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(as_torch(state.tensor(name)), policy[name])
        with pytest.raises(WeightUpdateError, match=r"input_proj.weight' has shape \(64, 64\)"):
            engine.update_weights({product: torch.zeros(64, 64)}, blocking=True)
        with pytest.raises(WeightUpdateError, match=r"mtp_layers.1.input_proj.weight' is not a"):
            engine.update_weights(
                {product.replace("layers.0", "layers.1"): torch.zeros(64, 128)}, blocking=True
            )


@pytest.mark.parametrize("drafting", [{}, {"draft_model": "mtp"}])
def test_update_from_the_whole_checkpoint_is_accepted(
    tmp_path: Path, drafting: dict[str, Any]
) -> None:
    """Copies of the embedding and the head, or the whole layer, are passed over."""
    model = MtpModel(tmp_path, FAMILIES["glm4-moe"])
    with engine_of(model.folder, **drafting) as engine:
        engine.update_weights(str(model.folder), blocking=True)
        assert (model.family.names[2] in engine.weight_sync.weights.names) == bool(drafting)


def test_quantized_policy_has_a_quantized_mtp_layer(qwen: MtpModel) -> None:
    params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
    with engine_of(qwen.folder, quantization="int8", dtype="auto") as engine:
        plain, size = bits(engine.generate(PROMPTS, params, 2)), engine.memory_budget.weights
    with engine_of(
        qwen.folder, quantization="int8", dtype="auto", draft_model="mtp", max_drafts=3
    ) as engine:
        assert bits(engine.generate(PROMPTS, params, 2)) == plain
        assert drafts_of(engine, "mtp")[0] > 20
        assert form_of(engine.model.params["mtp.project"]) is not None
        assert engine.memory_budget.weights > size


def test_states_keep_their_memory_with_an_mtp_layer(qwen: MtpModel) -> None:
    """A block must not hold a state of its own because the layer has none."""
    with engine_of(qwen.folder) as engine:
        plain = engine.memory_budget
    with engine_of(qwen.folder, draft_model="mtp") as engine:
        budget = engine.memory_budget
        assert budget.state_bytes == plain.state_bytes > 0
        # one attention layer of the policy, one of the head
        assert budget.bytes_per_token == 2 * plain.bytes_per_token


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft_layers": 1}, "needs draft_model='self'"),
        ({"draft_quantization": "file"}, "use 'int8', 'int8-32' or 'int4'"),
        ({"tensor_parallel": 2}, "runs on one rank"),
    ],
)
def test_mtp_rejects_other_options(mimo: MtpModel, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_of(mimo.folder, draft_model="mtp", **options)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_family_without_mtp_is_rejected_by_name(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
    with pytest.raises(ConfigError, match=r"not possible for \w+ForCausalLM: .* MiMoForCausalLM"):
        engine_of(folder, draft_model="mtp")


def test_checkpoint_without_an_mtp_layer_is_rejected(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3_5")
    with pytest.raises(ConfigError, match=r"has no tensor 'mtp.fc.weight'; use"):
        engine_of(folder, draft_model="mtp")


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("input_proj.weight", (64, 64), r"has shape \(64, 64\), expected \(64, 128\)"),
        ("self_attn.k_proj.weight", (64, 64), r"has shape \(64, 64\), expected \(32, 64\)"),
        ("self_attn.q_norm.weight", (16,), "is not part of MiMoForCausalLM"),
        ("final_layernorm.weight", None, r"is missing \(1 of \d+ are\)"),
    ],
)
def test_wrong_mtp_tensor_is_rejected(
    mimo: MtpModel, tmp_path: Path, name: str, shape: tuple[int, ...] | None, reason: str
) -> None:
    folder = copied(mimo.folder, tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored.pop(f"model.mtp_layers.0.{name}", None)
    if shape is not None:
        stored[f"model.mtp_layers.0.{name}"] = torch.zeros(shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"mtp_layers.0.{name}' {reason}"):
        engine_of(folder, draft_model="mtp")

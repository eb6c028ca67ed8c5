"""`LoraPolicy`: bits of the engine, gradients of PEFT, and folders readable by PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from nano_inference import EngineConfig, InferenceEngine, LoraSettings, SamplingParams
from nano_inference.checkpoints.lora import CONFIG, WEIGHTS
from nano_inference.config import Backend
from nano_inference.errors import AdapterError, ConfigError
from nano_inference.rl import LoraPolicy, score
from tests.models.families import CASES
from tests.models.strong import strong_model, strong_prompts
from tests.models.tiny import tiny_llama, tiny_model

ALL = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "lm_head",
)
FAMILIES = ("llama", "gemma2", "qwen3", "olmo2", "granite")  # dense, with caps, norms, scales


def engine_of(folder: Path, backend: Backend = "cpu", **options: Any) -> InferenceEngine:
    fields: dict[str, Any] = {"max_loras": 2, "kv_cache_memory": 2**24, "device": "cpu"}
    return InferenceEngine(EngineConfig(str(folder), backend=backend, **(fields | options)))


def strong_policy(engine: InferenceEngine, **options: Any) -> LoraPolicy:
    """A policy whose adapter is not near zero."""
    policy = LoraPolicy(engine, LoraSettings(rank=4, alpha=6, targets=ALL), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in policy.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logprobs_equal_the_engine_bit_for_bit(
    tmp_path: Path, backend: Backend, dtype: Any
) -> None:
    with engine_of(tiny_llama(tmp_path), backend, dtype=dtype) as engine:
        policy = strong_policy(engine, name="own")
        assert policy.publish().version == 1
        params = SamplingParams(max_tokens=20, temperature=0.7, adapter="own", ignore_eos=True)
        samples = engine.generate([[3, 4, 5], [3, 4, 9, 8]], params, num_samples_per_prompt=2)
        for sample in samples:
            ids, start = (
                [*sample.prompt_tokens, *sample.completion_tokens],
                len(sample.prompt_tokens),
            )
            (computed,) = policy.logprobs([ids], from_position=start, temperature=0.7)
            assert computed.tolist() == list(sample.logprobs)
            (scored,) = score(engine, [ids], from_position=start, temperature=0.7, adapter="own")
            assert scored.tolist() == list(sample.logprobs)


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_peft(tmp_path: Path, family: str) -> None:
    case = CASES[family]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    sequences = strong_prompts(oracle.get_input_embeddings().num_embeddings, (9, 40))
    with engine_of(tmp_path, dtype="float32") as engine:
        policy = strong_policy(engine)
        sum(each[1:].sum() for each in policy.logprobs(sequences)).backward()  # pyright: ignore
        policy.save_pretrained(tmp_path / "adapter")
        model = PeftModel.from_pretrained(oracle, tmp_path / "adapter", is_trainable=True).eval()
        for ids in sequences:
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
            rows[:-1].gather(1, torch.tensor(ids)[1:, None]).sum().backward()
        theirs = {
            name.replace(".default", ""): param.grad
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        grads = {name: param.grad for name, param in policy.named_parameters()}
        assert grads.keys() == theirs.keys()
        for name, grad in grads.items():
            assert grad is not None
            assert (grad - theirs[name]).norm() < 1e-4 * theirs[name].norm(), name


def test_gradients_do_not_depend_on_threads(tmp_path: Path) -> None:
    results: list[list[torch.Tensor]] = []
    sequences = [[3, 4, 5, 6, 7], [3, 4, 5, 9, 9, 9], [8, 8, 8]]
    with engine_of(tiny_llama(tmp_path)) as engine:
        for workers in (1, 2):
            policy = strong_policy(engine, micro_batch_tokens=6, num_workers=workers)
            torch.cat([each[1:] for each in policy.logprobs(sequences)]).sum().backward()
            results.append([param.grad for param in policy.parameters()])  # pyright: ignore
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_new_adapter_changes_nothing_and_learns(tmp_path: Path) -> None:
    with engine_of(tiny_llama(tmp_path), dtype="float32") as engine:
        policy = LoraPolicy(engine, LoraSettings(rank=2, targets=("q_proj", "v_proj")))
        assert {name.split(".")[-3] for name, _ in policy.named_parameters()} == {
            "q_proj",
            "v_proj",
        }
        ids = [3, 4, 5, 6, 7, 8, 9]
        (before,) = policy.logprobs([ids], from_position=1)
        assert torch.equal(before, score(engine, [ids], from_position=1)[0])
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
        for _ in range(8):
            optimizer.zero_grad()
            (-policy.logprobs([ids], from_position=1)[0].sum()).backward()
            optimizer.step()
        (after,) = policy.logprobs([ids], from_position=1)
        assert after.sum() > before.sum() + 1
        # the base weights are unchanged
        assert torch.equal(before, score(engine, [ids], from_position=1)[0])


def test_saved_adapter_folder_can_be_loaded(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    with engine_of(folder) as engine:
        policy = strong_policy(engine)
        policy.save_pretrained(tmp_path / "adapter")
        config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6, sorted(ALL))
        other = LoraPolicy(engine, LoraSettings(rank=4, alpha=6, targets=ALL))
        other.load(tmp_path / "adapter")
        saved = load_file(tmp_path / "adapter" / WEIGHTS)
        for name, param in other.named_parameters():
            assert torch.equal(param, saved[name])
        with pytest.raises(ConfigError, match="already holds an adapter"):
            policy.save_pretrained(tmp_path / "adapter")
        for settings, expected in (
            (LoraSettings(rank=5, alpha=6, targets=ALL), "another rank or scale"),
            (LoraSettings(rank=4, alpha=7, targets=ALL), "another rank or scale"),
            (
                LoraSettings(rank=4, alpha=6, targets=ALL[:3]),
                "its targets must be those of this adapter",
            ),
        ):
            with pytest.raises(AdapterError, match=expected):
                LoraPolicy(engine, settings).load(tmp_path / "adapter")
        name = next(iter(saved))
        save_file(saved | {name: saved[name] * torch.nan}, tmp_path / "adapter" / WEIGHTS)
        with pytest.raises(AdapterError, match="has non-finite values in"):
            other.load(tmp_path / "adapter")
        assert all(bool(param.isfinite().all()) for param in other.parameters())


def test_lora_policy_rejects_modules_without_gradients(tmp_path: Path) -> None:
    for family, expected in (
        ("qwen3-moe", "it has experts"),
        ("lfm2", "layers that carry a state"),
    ):
        folder = tiny_model(tmp_path / family, family)
        with engine_of(folder) as engine, pytest.raises(ConfigError, match=expected):
            LoraPolicy(engine)
    with engine_of(tiny_llama(tmp_path / "llama"), max_lora_rank=8) as engine:
        with pytest.raises(AdapterError, match="rank=16 exceeds max_lora_rank=8"):
            LoraPolicy(engine)
        with pytest.raises(
            AdapterError, match="'wq' is not an adaptable module of LlamaForCausalLM"
        ):
            LoraPolicy(engine, LoraSettings(rank=2, targets=("wq",)))


def test_lora_policy_obeys_the_adapter_rules(tmp_path: Path) -> None:
    with engine_of(tiny_llama(tmp_path), max_loras=1) as engine:
        policy = strong_policy(engine)
        with pytest.raises(AdapterError, match="kv_policy='wait' must be one of"):
            policy.publish(kv_policy="wait")
        with pytest.raises(AdapterError, match="must be a printable string"):
            policy.publish("a\nb")
    none = pytest.raises(AdapterError, match="set max_loras to the number to allow")
    with engine_of(tiny_llama(tmp_path / "other"), max_loras=0) as engine, none:
        strong_policy(engine).publish()


def test_gradient_uses_the_scored_weights(tmp_path: Path) -> None:
    with engine_of(tiny_llama(tmp_path), dtype="float32") as engine:
        policy, name = strong_policy(engine), "model.layers.0.self_attn.q_proj.weight"
        weight = load_file(tmp_path / "model.safetensors")[name]
        (scored,) = policy.logprobs([[3, 4, 5, 6]])
        engine.update_weights({name: weight * 2}, blocking=True)
        with pytest.raises(RuntimeError, match="updated or put to sleep between"):
            scored[1:].sum().backward()
        (scored,) = policy.logprobs([[3, 4, 5, 6]])
        engine.sleep(weights=True)
        with pytest.raises(RuntimeError, match="updated or put to sleep between"):
            scored[1:].sum().backward()
        assert all(param.grad is None for param in policy.parameters())
        engine.wake()
        scored[1:].sum().backward()  # under the weights at scoring time
        assert all(param.grad is not None for param in policy.parameters())

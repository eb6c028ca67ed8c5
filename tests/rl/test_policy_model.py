"""`PolicyModel`: parameters, bitwise equal logprobs, and publishing."""

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nano_inference import (
    ConfigError,
    EngineConfig,
    EngineDead,
    InferenceEngine,
    InvalidRequest,
    SamplingParams,
)
from nano_inference.arrays import as_torch
from nano_inference.checkpoints import loading
from nano_inference.checkpoints.loading import load_spec, resolve_dtype
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.models.spec.read import CONVERTED
from nano_inference.rl import PolicyModel, score
from tests.models.families import CASES
from tests.models.strong import TOLERANCE, disagreement, strong_model
from tests.models.tiny import FAMILIES, family_weights, llama_config, tiny_llama, tiny_model
from tests.rl.training import SEQUENCES, bits, build, gradients

DTYPES = ("float32", "bfloat16")
PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 40)]
PARAMS = SamplingParams(temperature=0.7, max_tokens=12, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def serving(engine: InferenceEngine) -> dict[str, Tensor]:
    places = slots(param_table(engine.spec))
    return {
        name: as_torch(read(engine.model.params, slot)).clone() for name, slot in places.items()
    }


def drawn_and_scored(model: PolicyModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return the bits of the engine's logprobs for its samples, and of the model's logprobs for
    them.
    """
    samples = model.engine.generate(PROMPTS, PARAMS, 3)
    starts = [len(sample.prompt_tokens) for sample in samples]
    whole = [[*sample.prompt_tokens, *sample.completion_tokens] for sample in samples]
    logprobs = model.logprobs(whole, from_position=starts, temperature=PARAMS.temperature)
    return [bits(torch.tensor(sample.logprobs)) for sample in samples], [
        bits(each) for each in logprobs
    ]


# The quick tier has all families on the reference backend, and some on the kernels.
@pytest.mark.thorough(
    but=[
        *("llama-cpu-bfloat16", "qwen3-cpu-bfloat16", "glm4-cpu-float32"),
        *(f"{family}-reference-{DTYPES[i % 2]}" for i, family in enumerate(FAMILIES)),
    ]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_publish_makes_engine_logprobs_equal_the_model(
    tmp_path: Path, family: str, backend: str, dtype: str
) -> None:
    with build(
        tiny_model(tmp_path, family), dtype=dtype, backend=backend, block_size=4, lookahead=1
    ) as engine:
        model = PolicyModel(engine)
        reported, scored = drawn_and_scored(model)
        assert scored == reported
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        gradients(model)
        optimizer.step()
        reported, scored = drawn_and_scored(model)
        assert scored != reported
        assert model.publish().version == engine.get_weight_version() == 1
        reported, scored = drawn_and_scored(model)
        assert scored == reported
        assert [bits(each) for each in model.logprobs(SEQUENCES)] == [
            bits(each) for each in score(engine, SEQUENCES)
        ]
        engine.loop.check()


Step = Callable[[PolicyModel], object]


def optimizer_step(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Step:
    def step(model: PolicyModel) -> None:
        gradients(model)
        make(model.parameters()).step()

    return step


def swap_rows(matrix: Tensor) -> None:
    """Swap bits while torch's version counter stays the same."""
    matrix.copy_(matrix.flip(0))


@pytest.mark.thorough(cases=["step2"])
@pytest.mark.parametrize(
    "step",
    [
        optimizer_step(lambda params: torch.optim.SGD(params, lr=0.1)),
        optimizer_step(lambda params: torch.optim.SGD(params, lr=0.1, foreach=True)),
        optimizer_step(lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True)),
        optimizer_step(lambda params: torch.optim.AdamW(params, lr=0.1, fused=True)),
        lambda model: model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}),
        lambda model: model.to(torch.bfloat16),
        lambda model: [param.data.mul_(1.5) for param in model.parameters()],
        lambda model: swap_rows(model.get_parameter("lm_head.weight").data),
        lambda model: swap_rows(
            torch.from_numpy(model.get_parameter("model.embed_tokens.weight").detach().numpy())
        ),
    ],
)
def test_parameter_change_of_any_kind_is_detected(folder: Path, step: Step) -> None:
    """Cached prefixes of older parameters do not match either."""
    with build(folder, block_size=4) as engine:
        model = PolicyModel(engine)
        before = model.logprobs(SEQUENCES)
        step(model)
        logprobs = [bits(each) for each in model.logprobs(SEQUENCES)]
        model.publish()
        served = [bits(each) for each in score(engine, SEQUENCES)]
    assert logprobs == served
    assert logprobs != [bits(each) for each in before]


def test_parameters_are_packed_only_when_they_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(folder) as engine:
        model = PolicyModel(engine)
        model.logprobs(SEQUENCES)
        versions = engine.loop.sequences.versions
        before = dict(versions)
        computed = engine.runner.tokens_computed
        model.logprobs([SEQUENCES[0]], from_position=39)
        assert versions == before
        assert engine.runner.tokens_computed - computed < 16  # the prefix is still in the cache


@pytest.mark.parametrize("tie", [True, False])
def test_names_and_initial_values_come_from_the_checkpoint(tmp_path: Path, tie: bool) -> None:
    folder = tiny_llama(tmp_path, tie=tie)
    checkpoint = load_file(folder / "model.safetensors")
    with build(folder, dtype="bfloat16") as engine:
        state = PolicyModel(engine).state_dict()
        served = serving(engine)
        assert (
            next(iter(PolicyModel(engine, dtype=torch.bfloat16).parameters())).dtype
            == torch.bfloat16
        )
    assert set(state) == set(checkpoint)
    assert ("lm_head.weight" in state) is not tie
    for name, tensor in checkpoint.items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], tensor)
        assert torch.equal(state[name].bfloat16(), served[name])


def test_initial_values_come_from_an_updated_engine(folder: Path) -> None:
    changed = family_weights(llama_config(), seed=9)
    changed = {name: changed[name] for name in list(changed)[3:7]}
    with build(folder, dtype="bfloat16") as engine:
        engine.update_weights(changed, blocking=True)
        model = PolicyModel(engine)
        served = serving(engine)
        reported, scored = drawn_and_scored(model)
    assert scored == reported
    for name, param in model.named_parameters():
        assert torch.equal(param.bfloat16(), served[name])
    assert torch.equal(
        dict(model.named_parameters())[next(iter(changed))], served[next(iter(changed))].float()
    )


def test_model_builds_its_engine_from_a_configuration(folder: Path) -> None:
    model = PolicyModel(
        EngineConfig(model_path=str(folder), device="cpu", dtype="float32", kv_cache_memory=2**22)
    )
    with model.engine as engine:
        assert bits(model([[5, 6, 7]])[0]) == bits(score(engine, [[5, 6, 7]])[0])
    with pytest.raises(EngineDead):
        model.logprobs([[5, 6]])


def test_logprobs_under_no_grad_build_no_graph(folder: Path) -> None:
    with build(folder) as engine:
        model = PolicyModel(engine)
        with torch.no_grad():
            assert not any(each.requires_grad for each in model.logprobs(SEQUENCES))
        assert all(each.requires_grad for each in model.logprobs(SEQUENCES))
        model.requires_grad_(False)
        assert not any(each.requires_grad for each in model.logprobs(SEQUENCES))
        assert model.logprobs([]) == []


def test_parameters_that_change_before_backward_are_an_error(folder: Path) -> None:
    with build(folder) as engine:
        model = PolicyModel(engine)
        loss = model.logprobs([[5, 6, 7]], from_position=1)[0].sum()
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = model.logprobs([[5, 6, 7]], from_position=1)[0].sum()
        next(model.parameters()).data.mul_(2)
        with pytest.raises(RuntimeError, match="modified between logprobs and backward"):
            loss.backward()


def test_models_of_one_engine_are_independent(folder: Path) -> None:
    with build(folder) as engine:
        one, other = PolicyModel(engine), PolicyModel(engine)
        first = [bits(each) for each in one.logprobs(SEQUENCES)]
        with torch.no_grad():
            next(other.parameters()).mul_(2)
        assert [bits(each) for each in other.logprobs(SEQUENCES)] != first
        assert [bits(each) for each in one.logprobs(SEQUENCES)] == first
        assert set(engine.runner.models) == {"policy", "trainer", "trainer-2"}


@pytest.mark.thorough
def test_logprobs_while_another_thread_generates(folder: Path) -> None:
    with build(folder, max_tokens_per_batch=8, lookahead=1) as engine:
        model = PolicyModel(engine)
        expected, alone = model.logprobs(SEQUENCES), engine.generate(PROMPTS, PARAMS, 4)
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.extend(engine.generate(PROMPTS, PARAMS, 4))
        )
        thread.start()
        for _ in range(3):
            with torch.no_grad():
                next(model.parameters()).add_(0)  # packs the parameters again
            assert [bits(each) for each in model.logprobs(SEQUENCES)] == [
                bits(each) for each in expected
            ]
        thread.join(timeout=120)
    assert [sample.logprobs for sample in results] == [sample.logprobs for sample in alone]


def test_bad_arguments_are_rejected(folder: Path) -> None:
    with build(folder) as engine:
        model = PolicyModel(engine)
        with pytest.raises(InvalidRequest, match="token id 300"):
            model.logprobs([[300]])
        for options, message in (
            ({"micro_batch_tokens": 0}, "micro_batch_tokens=0 must be a positive integer"),
            ({"num_workers": 1.5}, r"num_workers=1\.5"),
            ({"dtype": torch.int64}, "floating point"),
            ({"gradient_dtype": torch.float16}, r"gradient_dtype=torch\.float16"),
            ({"recompute_activations": "yes"}, "recompute_activations='yes' must be True, False"),
        ):
            with pytest.raises(ConfigError, match=message):
                PolicyModel(engine, **options)


def test_closed_model_returns_memory_to_the_engine(folder: Path) -> None:
    with build(folder) as engine:
        before = set(engine.runner.models)
        model = PolicyModel(engine)
        expected = [bits(each) for each in model.logprobs(SEQUENCES)]
        model.close()
        model.close()
        assert set(engine.runner.models) == set(engine.runner.storages) == before
        with pytest.raises(InvalidRequest, match="was closed"):
            model.logprobs(SEQUENCES)
        model.publish()
        assert [bits(each) for each in PolicyModel(engine).logprobs(SEQUENCES)] == expected
        engine.loop.check()


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gemma3"])
def test_saved_checkpoint_equals_the_published_weights(tmp_path: Path, family: str) -> None:
    """Another engine loads the same bits, and transformers finds every tensor."""
    from transformers import AutoModelForCausalLM

    source = tiny_model(tmp_path / "source", family, std=0.1)
    (source / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x", encoding="utf-8")
    with build(source, dtype="bfloat16") as engine:
        model = PolicyModel(engine)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25)
        model.publish()
        model.save_pretrained(tmp_path / "saved")
        checksum = engine.weights_checksum()
        with pytest.raises(ConfigError, match="already holds a model"):
            model.save_pretrained(tmp_path / "saved")
    with build(tmp_path / "saved", dtype="bfloat16") as engine:
        assert engine.weights_checksum() == checksum
    for name in ("tokenizer_config.json", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "saved" / name).is_file()
    loaded: Any
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        output_loading_info=True,  # pyright: ignore
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16


def test_masters_resume_a_run_without_rounding(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    saved = tmp_path / "saved"
    generator = torch.Generator().manual_seed(3)
    with build(source, dtype="bfloat16") as engine:
        model = PolicyModel(engine)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 1e-4 * torch.rand(param.shape, generator=generator))
        masters = {name: param.detach().clone() for name, param in model.named_parameters()}
        model.save_pretrained(saved, masters=True)
    with build(saved, dtype="bfloat16") as engine:
        model = PolicyModel(engine)
        assert any(not torch.equal(p, masters[name]) for name, p in model.named_parameters())
        model.load_masters(saved)
        assert all(torch.equal(p, masters[name]) for name, p in model.named_parameters())
        model.publish()  # rounded masters equal the checkpoint next to them
        with pytest.raises(ConfigError, match="has no master weights; save_pretrained"):
            model.load_masters(source)
        with pytest.raises(ConfigError, match=r"float32 \(.*but the parameter is torch.bfloat16"):
            PolicyModel(engine, dtype=torch.bfloat16).load_masters(saved)


def test_masters_of_another_model_change_nothing(tmp_path: Path) -> None:
    with build(tiny_model(tmp_path / "qwen2", "qwen2")) as engine:
        PolicyModel(engine).save_pretrained(tmp_path / "saved", masters=True)
    with build(tiny_llama(tmp_path / "llama")) as engine:
        model = PolicyModel(engine)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        with pytest.raises(ConfigError, match="load it into the model that saved it"):
            model.load_masters(tmp_path / "saved")
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_checkpoint_is_not_saved_next_to_shards(tmp_path: Path) -> None:
    """The index would keep naming the shards, and they would be loaded."""
    source = tiny_llama(tmp_path / "source")
    with build(source) as engine:
        model = PolicyModel(engine)
        for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).write_bytes(b"")
            with pytest.raises(ConfigError, match="already holds a model"):
                model.save_pretrained(tmp_path / name)


def test_checkpoint_saved_from_a_converted_file_keeps_its_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {CONVERTED: "gguf"}
    (source / "config.json").write_text(json.dumps(config))
    with build(source, dtype="float32") as engine:
        PolicyModel(engine).save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(loading, "cpu_multiplies_bf16", lambda: True)
    assert resolve_dtype("auto", load_spec(source)) == torch.bfloat16
    assert resolve_dtype("auto", load_spec(tmp_path / "saved")) == torch.float32


@pytest.mark.thorough(cases=["granite-moe", "granite-moe-shared", "deepseek-v3"])
@pytest.mark.parametrize(
    "family",
    ["phi3", "glm4", "qwen2-moe", "granite-moe", "granite-moe-shared", "gpt-oss", "deepseek-v3"],
)
def test_fused_tensors_and_experts_keep_the_checkpoint_layout(tmp_path: Path, family: str) -> None:
    """The files compute the same in transformers as the published weights in the engine."""
    case = CASES[family]
    source = tmp_path / "source"
    kind = type(strong_model(source, case.class_name, **case.config))
    with build(source) as engine:
        model = PolicyModel(engine)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 0.1 * torch.rand(param.shape, generator=generator))
        model.publish()
        model.save_pretrained(tmp_path / "saved")
        checksum = engine.weights_checksum()
    with build(tmp_path / "saved") as engine:
        assert engine.weights_checksum() == checksum
    oracle = kind.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    assert disagreement(tmp_path / "saved", oracle, backend=case.backend) < TOLERANCE

"""Gradients of `PolicyModel` and `LoraPolicy` by the CUDA kernels, in Triton's interpreter on
machines without a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import LoraSettings
from nano_inference.rl import LoraPolicy, PolicyModel, activations, score
from tests.depth import at_depth
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import FAMILIES, tiny_llama, tiny_model
from tests.rl.backward.test_kernel_gradients import EXPERTS, by_torch, worst
from tests.rl.test_activations import SLOW, TARGETS, require_equal_bits
from tests.rl.training import bits, build, gradients

pytest.importorskip("triton")

from nano_inference.ops.cuda.gradients import CudaGradients

pytestmark = pytest.mark.thorough

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a prefix that two share, one inside another, one twice, and one longer than windows and tiles of keys
SEQUENCES = [
    [3 + (7 * i * j) % 250 for i in range(n)]
    for j, n in ((1, 12), (2, 9), (1, 16), (4, 34), (2, 9))
]
SMALL = {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 300}
COVERED = [family for family in FAMILIES if family != "nanochat"]


def on_cuda(folder: Path, **options: Any) -> Any:
    """Build an engine on the CUDA backend."""
    defaults: dict[str, Any] = {
        "device": DEVICE,
        "backend": "cuda",
        "cuda_graphs": False,  # tested elsewhere
        "block_size": 16,
        "kv_cache_memory": 2**22,
    }
    return build(folder, **(defaults | options))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyModel]:
    folder = tiny_llama(tmp_path_factory.mktemp("model"), std=0.1, tie=True)
    with on_cuda(folder) as engine:
        yield PolicyModel(engine, micro_batch_tokens=32)


@pytest.mark.parametrize("family", COVERED)
def test_cuda_gradients_of_families_equal_torch(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences exceed the windows, run in several micro-batches, and have a temperature."""
    with on_cuda(tiny_model(tmp_path, family, **SMALL)) as engine:
        policy = PolicyModel(engine, micro_batch_tokens=32)
        assert policy.gradients == "kernels"
        ours = gradients(policy, SEQUENCES, temperature=0.8)
        theirs = by_torch(policy, monkeypatch, sequences=SEQUENCES, temperature=0.8)
    assert 0 < worst(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", EXPERTS)
def test_cuda_gradients_of_experts_equal_torch(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts, gates, biases, softmax and sigmoid, and experts that no row chose."""
    case = CASES[family]
    strong_model(tmp_path, case.class_name, **case.config)
    with on_cuda(tmp_path) as engine:
        policy = PolicyModel(engine, micro_batch_tokens=32)
        assert policy.gradients == "kernels"
        ours = gradients(policy, SEQUENCES, temperature=0.8)
        theirs = by_torch(policy, monkeypatch, sequences=SEQUENCES, temperature=0.8)
    unchosen = {name for name, grad in theirs.items() if not grad.any()}
    assert unchosen == {name for name, grad in ours.items() if not grad.any()}
    for name in theirs.keys() - unchosen:
        # the terms of a sink's gradient cancel
        assert float((ours[name] - theirs[name]).norm() / theirs[name].norm()) < 4e-5, name


def test_uncovered_families_differentiate_in_torch(tmp_path: Path) -> None:
    with on_cuda(tiny_model(tmp_path, "nanochat", **SMALL)) as engine:
        assert PolicyModel(engine).gradients == "torch"


def test_cuda_adapter_gradients_equal_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LoraSettings(rank=4, targets=("q_proj", "v_proj", "up_proj", "down_proj", "lm_head"))
    folder = tiny_llama(tmp_path, std=0.1, tie=True)
    with on_cuda(folder, max_loras=1) as engine:
        policy = LoraPolicy(engine, settings, micro_batch_tokens=32)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in policy.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        assert policy.gradients == "kernels"
        ours = {name: grad.clone() for name, grad in gradients(policy, SEQUENCES).items()}
        monkeypatch.setattr(LoraPolicy, "gradients", "torch")
        theirs = gradients(policy, SEQUENCES)
    assert 0 < worst(ours, theirs) < 1e-5


def test_backward_reads_the_weights_of_the_engine(
    model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parameter is cast again, and no matrix is copied."""
    read: list[int] = []
    device = torch.device(DEVICE)

    class Noted(CudaGradients):
        def packed(self, matrix: Tensor) -> Any:
            read.append(matrix.data_ptr())
            return super().packed(matrix)

    monkeypatch.setattr(PolicyModel, "_cast_one", None)
    monkeypatch.setattr(PolicyModel, "_kernels", lambda *_: Noted(torch.float32, device))
    gradients(model, SEQUENCES[:2])
    held = {param.data_ptr() for param in model._trainer._decoder.params.values()}
    assert len(set(read)) > 4
    assert set(read) <= held


def test_backward_launches_on_the_device_of_the_engine(
    model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device, which may be another card."""
    entered: list[str] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device.type)
        yield
        entered.append("left")

    queue = "nano_inference.rl.scoring_module.queue_of"
    monkeypatch.setattr(queue, lambda on: SimpleNamespace(current=lambda: current(on)))
    multiply = CudaGradients.product

    def product(*args: Any) -> Tensor:
        assert entered == [DEVICE]
        return multiply(*args)

    monkeypatch.setattr(CudaGradients, "product", product)
    gradients(model, SEQUENCES[2:3])
    assert entered == [DEVICE, "left"]


def test_gradients_after_close_have_the_same_bits(tmp_path: Path) -> None:
    """Without the engine's set, parameters are cast one at a time."""
    with on_cuda(tiny_llama(tmp_path, std=0.1)) as engine:
        policy = PolicyModel(engine)
        results: list[list[Tensor]] = []
        for closes in (False, True):
            (logprobs,) = policy.logprobs(SEQUENCES[:1])
            if closes:
                policy.close()
            results.append([*torch.autograd.grad(logprobs[1:].sum(), [*policy.parameters()])])
    assert all(map(torch.equal, *results))


@settings(max_examples=at_depth(5), deadline=None, suppress_health_check=SLOW)
@given(
    family=st.sampled_from(["llama", "gemma2", "qwen3", "granite", "mixtral"]),
    layers=st.integers(1, 2),
    targets=st.sets(st.sampled_from(TARGETS), max_size=2),
    sequences=st.lists(st.lists(st.integers(5, 8), min_size=2, max_size=9), max_size=2, min_size=1),
    kept_rows=st.integers(0, 9),
)
def test_recomputed_layers_keep_all_bits_on_cuda(
    family: str, layers: int, targets: set[str], sequences: list[list[int]], kept_rows: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "KEPT_ROWS", kept_rows)
        tiny_model(Path(folder), family, **SMALL, num_hidden_layers=layers)
        targets = set() if family == "mixtral" else targets  # no adapters of models with experts
        with on_cuda(Path(folder), max_loras=1 if targets else 0) as engine:
            require_equal_bits(engine, sequences, tuple(sorted(targets)), micro_batch_tokens=8)


@pytest.mark.parametrize("family", ["llama", "qwen2-moe"])
def test_cuda_gradients_do_not_depend_on_the_engine(tmp_path: Path, family: str) -> None:
    """Other chunks, caches and kernels of the forward pass change no bit of gradients."""
    case = CASES[family]
    strong_model(tmp_path, case.class_name, **case.config)
    results: list[dict[str, Tensor]] = []
    for options in (
        {"batch_invariant": True},
        {"batch_invariant": True, "max_chunk_tokens": 7, "cache_type": "radix", "block_size": 32},
    ):
        with on_cuda(tmp_path, **options) as engine:
            grads = gradients(PolicyModel(engine, num_workers=2), SEQUENCES[:3])
            results.append({name: grad.clone() for name, grad in grads.items()})
    assert all(torch.equal(results[1][name], grad) for name, grad in results[0].items())


def test_parameters_of_the_engines_dtype_are_its_set(tmp_path: Path) -> None:
    """A step in place changes the logprobs, and so do parameters in other memory."""
    with on_cuda(tiny_llama(tmp_path, std=0.1)) as engine:
        policy = PolicyModel(engine)
        held = policy._trainer._decoder.params.values()
        whole = {param.untyped_storage().data_ptr() for param in held}
        assert {p.untyped_storage().data_ptr() for p in policy.parameters()} == whole
        before = bits(policy.logprobs(SEQUENCES[:1])[0])
        gradients(policy, SEQUENCES[:1])
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
        stepped = bits(policy.logprobs(SEQUENCES[:1])[0])
        assert stepped != before
        policy.publish()
        assert bits(score(engine, SEQUENCES[:1])[0]) == stepped
        query = policy.get_parameter("model.layers.0.self_attn.q_proj.weight")
        query.data = query.data * 2
        doubled = policy.logprobs(SEQUENCES[:1])[0]
        assert bits(doubled) != stepped
        doubled[1:].sum().backward()
        wide = PolicyModel(engine, dtype=torch.bfloat16)
        assert not {p.untyped_storage().data_ptr() for p in wide.parameters()} & {
            param.untyped_storage().data_ptr() for param in wide._trainer._decoder.params.values()
        }


def test_parameters_stay_awake_with_their_values(tmp_path: Path) -> None:
    """Sleep frees the weights that serve, and a trainer steps meanwhile."""
    with on_cuda(tiny_llama(tmp_path, std=0.1)) as engine:
        policy = PolicyModel(engine)
        (logprobs,) = policy.logprobs(SEQUENCES[:1])
        before = {name: param.detach().clone() for name, param in policy.named_parameters()}
        embed = "model.embed_tokens.weight"
        asleep = engine.model.params["embed"]  # longer than pages of memory
        engine.sleep(weights=True)
        assert DEVICE == "cuda" or not torch.equal(asleep, before[embed])
        assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
        logprobs[1:].sum().backward()
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
        engine.wake()
        assert torch.equal(engine.model.params["embed"], before[embed])
        assert bits(policy.logprobs(SEQUENCES[:1])[0]) != bits(logprobs)
        policy.close()
        assert not engine.runner.awake

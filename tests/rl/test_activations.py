"""`recompute_activations`: every choice gives the same bits, and layers are recomputed as chosen."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference import LoraSettings
from nano_inference.errors import ConfigError
from nano_inference.rl import LoraPolicy, PolicyModel, activations, scoring_module
from nano_inference.rl.activations import KEPT_ROWS, recomputes
from nano_inference.rl.backward import decoder
from nano_inference.rl.backward.layer import AttentionState, Layer, MlpState
from nano_inference.rl.torch_decoder import TorchDecoder
from tests.depth import at_depth
from tests.models.tiny import tiny_llama, tiny_model
from tests.ops.compiler import NEEDS_COMPILER
from tests.rl.training import SEQUENCES, bits, build, gradients

CHOICES = (False, None, True)
DENSE = ("mistral", "gemma3", "granite", "gemma4")  # the last one has no kernels
EXPERTS = ("mixtral", "qwen3-moe", "gemma4-moe", "deepseek-v3")
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj", "lm_head")
TREES = st.lists(st.lists(st.integers(5, 8), min_size=2, max_size=24), min_size=1, max_size=4)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def strong_adapter(engine: Any, targets: tuple[str, ...], **options: Any) -> LoraPolicy:
    """Return a policy whose adapter is not near zero."""
    policy = LoraPolicy(engine, LoraSettings(rank=2, targets=targets), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in policy.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return policy


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets the number of each layer that a forward or backward pass computes."""
    computed: list[int] = []
    by_kernels, by_torch = Layer.attention, TorchDecoder._layer

    def attention(self: Layer, *args: Any) -> Any:
        computed.append(self.index)
        return by_kernels(self, *args)

    def layer(self: TorchDecoder, residual: Any, params: Any, index: int, *args: Any) -> Any:
        computed.append(index)
        return by_torch(self, residual, params, index, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layer, "attention", attention)
        patch.setattr(TorchDecoder, "_layer", layer)
        yield computed


def require_equal_bits(
    engine: Any, sequences: list[list[int]], targets: tuple[str, ...], **options: Any
) -> None:
    """Compare gradients, and the number of computed layers, under every choice.

    Args:
        engine: Engine that accepts adapters, unless there are no targets.
        sequences: Token ids.
        targets: Modules of an adapter to train. Empty: all weights.
        options: Options of the policies.
    """
    results: list[dict[str, list[int]]] = []
    passes: list[int] = []
    for choice in CHOICES:
        chosen = options | {"recompute_activations": choice}
        policy = (
            strong_adapter(engine, targets, **chosen) if targets else PolicyModel(engine, **chosen)
        )
        with counted() as computed:
            grads = gradients(policy, sequences)
        results.append({name: bits(grad.float()) for name, grad in grads.items()})
        passes.append(len(computed))
        policy.close()
    kept, by_rows, recomputed = passes
    has_layers = targets != ("lm_head",)  # with gradients
    assert recomputed == (2 * kept if has_layers else kept)
    assert kept <= by_rows <= recomputed
    assert results[1:] == [results[0]] * 2


@NEEDS_COMPILER
@settings(max_examples=at_depth(24), deadline=None, suppress_health_check=SLOW)
@given(data=st.data(), sequences=TREES)
def test_choices_give_equal_bits(data: st.DataObject, sequences: list[list[int]]) -> None:
    """Dense models, experts and adapters, by the kernels and in torch."""

    def drawn(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    family = drawn("llama", *DENSE, *EXPERTS)
    dtype, in_torch = drawn("float32", "bfloat16"), drawn(False, True)
    targets = data.draw(st.sets(st.sampled_from(TARGETS))) if family not in EXPERTS else set()
    rows, kept_rows = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 30))
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        if family == "llama":
            heads, layers = drawn(2, 4, 6), data.draw(st.integers(1, 4))
            shape = {"num_heads": heads, "num_kv_heads": drawn(1, 2), "hidden": 16 * heads}
            tiny_llama(folder, layers=layers, inner=drawn(40, 96), tie=drawn(False, True), **shape)
        else:
            tiny_model(folder, family)
        patch.setattr(activations, "KEPT_ROWS", kept_rows)
        if in_torch:
            patch.setattr(scoring_module, "gradients_of", lambda *_: "torch")
        loras = 1 if targets else 0
        with build(folder, dtype=dtype, max_loras=loras) as engine:
            options = {"micro_batch_tokens": rows, "num_workers": drawn(1, 2)}
            require_equal_bits(engine, sequences, tuple(sorted(targets)), **options)


def test_default_recomputes_above_a_number_of_rows() -> None:
    assert not recomputes(None, KEPT_ROWS)
    assert recomputes(None, KEPT_ROWS + 1)
    for rows in (1, KEPT_ROWS + 1):
        assert recomputes(True, rows)
        assert not recomputes(False, rows)


@NEEDS_COMPILER
@pytest.mark.parametrize(("choice", "layers"), [(False, 4), (True, 1)])
def test_recomputed_states_are_not_held(
    tmp_path: Path, choice: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the head, no state is held but that of the last layer."""
    held: list[int] = []
    compute = decoder.head_gradient

    def head_gradient(*args: Any) -> Tensor:
        states = [
            type(each) for each in gc.get_objects() if type(each) in (AttentionState, MlpState)
        ]
        held.append(len(states))
        return compute(*args)

    monkeypatch.setattr(decoder, "head_gradient", head_gradient)
    with build(tiny_llama(tmp_path, layers=4)) as engine:
        gradients(PolicyModel(engine, recompute_activations=choice), SEQUENCES)
    assert held == [2 * layers]


@pytest.mark.parametrize("value", [1, 0, "auto", "True", 1024, 0.5])
def test_other_choices_are_rejected_before_an_engine_is_built(value: Any) -> None:
    for policy in (PolicyModel, LoraPolicy):
        with pytest.raises(ConfigError) as raised:
            policy(None, recompute_activations=value)  # pyright: ignore[reportArgumentType]
        assert str(raised.value) == (
            f"recompute_activations={value!r} must be True, False or None (True above 1,024 rows)."
        )

"""Gradients against transformers' autograd, and their bits under any number of threads."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.models.parameters.fused import fused_tensors, unfused
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.read import spec_from_config
from nano_inference.rl import PolicyModel, score, torch_attention, torch_decoder
from nano_inference.rl.micro_batch import ScoredSequence, micro_batches
from tests.depth import at_depth
from tests.models.families import CASES
from tests.models.strong import strong_model
from tests.models.tiny import FAMILIES, tiny_llama, tiny_model
from tests.parity.compare import smollm2_oracle
from tests.rl.training import SEQUENCES, bits, build, coefficients, gradients, weighted_sum

Options = dict[str, Any]

TOLERANCE = 1e-4  # relative norm, for every parameter


def oracle_gradients(
    oracle: Any, ours: Mapping[str, Tensor], sequences: list[list[int]], temperature: float
) -> dict[str, Tensor]:
    logprobs: list[Tensor] = []
    for ids in sequences:
        rows = (oracle(torch.tensor([ids])).logits[0] / temperature).log_softmax(dim=-1)[:-1]
        chosen = rows.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
        logprobs.append(torch.cat([torch.zeros(1), chosen]))
    weighted_sum(logprobs, coefficients([len(ids) for ids in sequences])).backward()
    # parameters of the vision part have none
    grads = {name: each.grad for name, each in oracle.named_parameters() if each.grad is not None}
    config = oracle.config.to_dict()
    table = param_table(spec_from_config(config)) if config.get("architectures") else ()
    fused = fused_tensors(table)
    return {
        name: grad for given, whole in grads.items() for name, grad in unfused(fused, given, whole)
    }


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - grad).norm() / grad.norm()) for name, grad in theirs.items())


@pytest.mark.thorough(cases=["phi3"])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3-moe"])
def test_gradients_of_every_family_equal_transformers(tmp_path: Path, family: str) -> None:
    """Sequences exceed the windows, run in several micro-batches, and have a temperature."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path, family)
    with build(folder) as engine:
        ours = gradients(PolicyModel(engine, micro_batch_tokens=64), temperature=0.8)
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        worst_difference(ours, oracle_gradients(oracle.eval(), ours, SEQUENCES, 0.8)) <= TOLERANCE
    )


# `tests/checkpoints/test_lora.py` has the other families in the quick tier.
@pytest.mark.thorough(
    cases=[
        *("gemma3 with pictures", "gemma4 with inputs of layers", "deepseek-v3", "mixtral"),
        *list(CASES)[1::2],
    ]
)
@pytest.mark.parametrize("family", CASES)
def test_gradients_of_large_weights_equal_transformers(tmp_path: Path, family: str) -> None:
    """Logprobs equal the engine's bit for bit, and gradients equal those of transformers."""
    case = CASES[family]
    oracle = strong_model(tmp_path, case.class_name, **case.config)
    with build(tmp_path, backend=case.backend) as engine:
        scores = score(engine, SEQUENCES)
        model = PolicyModel(engine, micro_batch_tokens=64)
        logprobs = model.logprobs(SEQUENCES)
        ours = gradients(model)
    assert list(map(bits, scores)) == list(map(bits, logprobs))
    theirs = {
        name: grad
        for name, grad in oracle_gradients(oracle, ours, SEQUENCES, 1.0).items()
        if grad is not None
    }
    # routers and constants are not trained
    constants = ("e_score_correction_bias", ".act_fn.beta", ".act_fn.eps", ".layer_scalar")
    fixed = {name for name in ours if name.endswith(constants)}
    assert not any(bool(ours[name].any()) for name in fixed)
    trained = {name: grad for name, grad in ours.items() if name not in fixed}
    assert worst_difference(trained, theirs) <= TOLERANCE


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_gradients_under_stretched_ropes(tmp_path: Path, rope: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path, rope=rope, tie=True)
    with build(folder, backend="reference") as engine:
        ours = gradients(PolicyModel(engine))
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        worst_difference(ours, oracle_gradients(oracle.eval(), ours, SEQUENCES, 1.0)) <= TOLERANCE
    )


@pytest.mark.thorough
def test_gradients_of_smollm2_equal_transformers() -> None:
    sequences = [
        [1, *(100 + (977 * i * j) % 40000 for i in range(n))] for j, n in ((1, 12), (2, 25))
    ]
    with build(
        Path("smollm2-135m"), quantization=None, kv_cache_memory=2**26, max_model_len=512
    ) as engine:
        ours = gradients(PolicyModel(engine), sequences)
    # In float32 the oracle is off by 1.2e-4 itself.
    oracle = deepcopy(smollm2_oracle()).double()
    theirs = oracle_gradients(oracle, ours, sequences, 1.0)
    assert worst_difference(ours, theirs) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_do_not_depend_on_threads_or_schedule(tmp_path: Path, dtype: str) -> None:
    """Matrices are large enough for torch to split them. With five rows its bits depend on the
    split (seen in 2.13). Kernels and torch have other bits.
    """
    fives = [[3 + (11 * i * j) % 2000 for i in range(6)] for j in range(1, 9)]
    folder = tiny_llama(
        tmp_path, hidden=256, inner=768, num_heads=8, num_kv_heads=2, vocab_size=3000, std=0.05
    )
    before = torch.get_num_threads()
    torch_runs: Options = {"backend": "reference"}
    runs: list[tuple[int, int | None, Options]] = [
        (1, 1, {}),
        (2, 2, {"cache_type": "radix", "max_chunk_tokens": 7}),
        (1, 2, {"lookahead": 1, "max_batch_size": 2}),
        (1, 1, torch_runs),
        (2, 2, torch_runs | {"cache_type": "radix", "max_chunk_tokens": 7}),
        (2, None, torch_runs | {"enable_prefix_caching": False}),
    ]
    results: dict[str, list[dict[str, list[int]]]] = {"kernels": [], "torch": []}
    try:
        for num_threads, num_workers, options in runs:
            with build(folder, dtype=dtype, num_threads=num_threads, **options) as engine:
                both: dict[str, list[int]] = {}
                for max_rows, sequences in ((64, SEQUENCES), (5, fives)):
                    model = PolicyModel(
                        engine, micro_batch_tokens=max_rows, num_workers=num_workers
                    )
                    torch.set_num_threads(num_threads)
                    both |= {
                        f"{max_rows} {name}": bits(grad)
                        for name, grad in gradients(model, sequences).items()
                    }
                results[PolicyModel(engine).gradients].append(both)
                assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    for ways in results.values():
        assert len(ways) == 3
        assert all(each == ways[0] for each in ways[1:])


def test_bfloat16_gradients_are_near_float32_gradients(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, dtype=torch.bfloat16, std=0.1)
    with build(folder, dtype="bfloat16") as engine:
        rounded = gradients(PolicyModel(engine, gradient_dtype=torch.bfloat16))
        exact = gradients(PolicyModel(engine, gradient_dtype=torch.float32))
    with build(folder, dtype="float32") as engine:
        other = gradients(PolicyModel(engine))
    assert 0 < worst_difference(rounded, exact) < 0.03
    assert all(bits(other[name]) == bits(grad) for name, grad in exact.items())


def test_gradients_pass_through_the_cast_unchanged(tmp_path: Path) -> None:
    """Masters with more digits than the engine's weights get the gradient at the rounded values."""
    folder = tiny_llama(tmp_path, std=0.1)
    with build(folder, dtype="bfloat16") as engine:
        model = PolicyModel(engine)
        at_masters = gradients(model)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.bfloat16())
        at_rounded = gradients(model)
    assert all(bits(at_masters[name]) == bits(grad) for name, grad in at_rounded.items())


def test_gradients_are_limited_to_requested_parameters(tmp_path: Path) -> None:
    with build(tiny_llama(tmp_path)) as engine:
        model = PolicyModel(engine)
        whole = gradients(model)
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("model.layers.1.") or name == "lm_head.weight")
            param.grad = None
        part = gradients(model)
    assert set(part) == {
        name for name in whole if name.startswith("model.layers.1.") or name == "lm_head.weight"
    }
    for name, grad in part.items():
        torch.testing.assert_close(grad, whole[name], rtol=1e-4, atol=1e-5)


def test_unused_logprobs_have_zero_gradients(tmp_path: Path) -> None:
    with build(tiny_llama(tmp_path)) as engine:
        model = PolicyModel(engine)
        logprobs = model.logprobs([[5, 6, 7]])[0]
        (torch.where(torch.tensor([False, True, True]), logprobs, 0.0) * 0).sum().backward()
        assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


TREES = st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=9), max_size=8)


@settings(max_examples=at_depth(100), deadline=None)
@given(sequences=TREES, max_rows=st.integers(1, 30), seed=st.integers(0, 999))
def test_micro_batches_cover_every_gradient_once(
    sequences: list[list[int]], max_rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [
        torch.randint(-1, 2, (len(ids) - 1,), generator=generator).tolist() for ids in sequences
    ]
    scored = [ScoredSequence(ids, 1, each) for ids, each in zip(sequences, grads, strict=True)]
    expected: dict[tuple[int, ...], float] = {}
    for ids, sequence_grads in zip(sequences, grads, strict=True):
        for row, grad in enumerate(sequence_grads):
            expected[tuple(ids[: row + 2])] = expected.get(tuple(ids[: row + 2]), 0.0) + grad
    norms: dict[tuple[int, ...], float] = {}
    for batch in micro_batches(scored, max_rows):
        longest = max(len(segment.path) for segment in batch.segments)
        assert len(batch.token_ids) <= max(max_rows, longest)
        assert [s.start for s in batch.segments] == [0, *(s.end for s in batch.segments[:-1])]
        prefixes: dict[int, tuple[int, ...]] = {}
        for segment in batch.segments:
            path = segment.path.tolist()
            assert path[segment.start - segment.end :] == list(range(segment.start, segment.end))
            for index, row in enumerate(path):
                prefixes[row] = tuple(batch.token_ids[path[: index + 1]].tolist())
                assert int(batch.positions[row]) == index
        assert len(set(prefixes.values())) == len(batch.token_ids), "a beginning stands twice"
        for owner, token, grad in zip(batch.owners, batch.targets, batch.gradients, strict=True):
            key = (*prefixes[int(batch.scored_rows[owner])], int(token))
            norms[key] = norms.get(key, 0.0) + float(grad)
    assert {key: grad for key, grad in norms.items() if grad} == {
        key: grad for key, grad in expected.items() if grad
    }


@pytest.mark.thorough(cases=["mistral"])
@pytest.mark.parametrize("family", ["mistral", "qwen3-moe"])
def test_long_sequences_use_linear_memory(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask has more rows than are computed together, also if a layer is recomputed."""
    masks: list[tuple[int, int]] = []
    build_mask = torch_attention._mask

    def mask(q: Tensor, k: Tensor, window: int) -> Tensor:
        masks.append((len(q), len(k)))
        return build_mask(q, k, window)

    monkeypatch.setattr(torch_attention, "_mask", mask)
    folder = tiny_model(tmp_path, family)
    with build(folder, dtype="bfloat16", backend="reference") as engine:
        model = PolicyModel(engine, num_workers=1, recompute_activations=True)
        whole = gradients(model)
        assert max(n for n, _ in masks) > 16
        masks.clear()
        monkeypatch.setattr(torch_decoder, "ATTENTION_ROWS", 16)
        in_pieces = gradients(model)
    assert max(n for n, _ in masks) == 16
    assert {length for n, length in masks if n == 16} >= {16, 32}, "rows see no key behind them"
    assert worst_difference(in_pieces, whole) < 0.05

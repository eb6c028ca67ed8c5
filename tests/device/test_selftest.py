"""`nano-inference info --selftest` passes right kernels and names wrong ones."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nano_inference.checkpoints.loading import load_spec
from nano_inference.cli.main import app
from nano_inference.device import selftest
from nano_inference.device.selftest import Differs, KernelSet, check, kernel_sets, usual_specs
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.cpu.backend import cpu_ops
from nano_inference.ops.cpu.build import best_instruction_set
from nano_inference.ops.cuda.backend import cuda_ops
from nano_inference.ops.reference.backend import reference_ops
from tests.models.tiny import tiny_llama, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return load_spec(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "invariant"),
    [
        *(("llama", False), ("gemma3", True), ("gemma4", False), ("deepseek-v3", True)),
        *(("lfm2", False), ("qwen3_5", True)),
    ],
)
def test_check_passes_right_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, invariant: bool
) -> None:
    monkeypatch.setattr(selftest, "LENGTHS", (3, 1))
    monkeypatch.setattr(selftest, "CONTEXTS", (3, 9))
    monkeypatch.setattr(selftest, "DRAWS", selftest.DRAWS[::2])
    monkeypatch.setattr(selftest, "VOCABULARY", 64)
    ops = cuda_ops(batch_invariant=invariant)
    check(ops, load_spec(tiny_model(tmp_path, family)), torch.float32, CPU)


def _wrong(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


BREAK: dict[str, Callable[[Any], Any]] = {
    "embed": _wrong,
    "linear": _wrong,
    "rms_norm": lambda pair: (pair[0] * torch.nan, pair[1]),
    "rope_and_store": _wrong,
    "attention": _wrong,
    "gate": _wrong,
    "short_conv": _wrong,
    "delta_net": _wrong,
    "sigmoid_gate": _wrong,
    "logits": _wrong,
    "gather_logprobs": _wrong,
    "few_rows": _wrong,
    "lora": _wrong,
    "sample": lambda draw: replace(draw, token_ids=draw.token_ids + 1),
    "sample_logits": lambda draw: replace(draw, logprobs=draw.logprobs - 1),
}
FAMILY = {"short_conv": "lfm2", "delta_net": "qwen3_5", "sigmoid_gate": "qwen3_5"}


@pytest.mark.parametrize("name", BREAK)
def test_check_names_the_wrong_operation(spec: ModelSpec, tmp_path: Path, name: str) -> None:
    if name in FAMILY:
        spec = load_spec(tiny_model(tmp_path, FAMILY[name]))
    plain = reference_ops()
    good = replace(plain, few_rows=lambda trunk, batch, view: trunk(plain, batch, view))

    def wrong(*args: Any) -> Any:
        return BREAK[name](getattr(good, name)(*args))

    def raising(*_: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: invalid argument\nmore")

    with pytest.raises(Differs, match=rf"^{name} is wrong"):
        check(replace(good, **{name: wrong}), spec, torch.float32, CPU)
    with pytest.raises(Differs, match=rf"^{name} fails: RuntimeError: Triton Error .CUDA.: inv"):
        check(replace(good, **{name: raising}), spec, torch.float32, CPU)


@pytest.mark.parametrize("codes", selftest.CODES)
def test_check_names_wrong_products_of_codes(spec: ModelSpec, codes: str) -> None:
    plain = reference_ops()

    def few_rows(trunk: Any, batch: Any, view: Any) -> torch.Tensor:
        form = getattr(trunk.__self__.params["layers.0.qkv"], "form", None)
        is_wrong = form is not None and form.name == codes
        return trunk(plain, batch, view) * (1.5 if is_wrong else 1.0)

    with pytest.raises(Differs, match=f"^few_rows of weights in {codes} is wrong"):
        check(replace(plain, few_rows=few_rows), spec, torch.float32, CPU)


@pytest.mark.parametrize("name", ["store", "values"])
def test_check_names_the_wrong_operation_on_latents(tmp_path: Path, name: str) -> None:
    ops, spec = reference_ops(), load_spec(tiny_model(tmp_path, "deepseek-v3"))
    right = getattr(ops.latent, name)
    wrong = ops.latent._replace(**{name: lambda *args: right(*args) * 1.5})
    check(ops, spec, torch.float32, CPU)
    with pytest.raises(Differs, match=rf"^latent {name} is wrong"):
        check(replace(ops, latent=wrong), spec, torch.float32, CPU)


def test_check_runs_every_kind_of_layer(tmp_path: Path) -> None:
    """Two kinds make keys, and each has layers that read them."""
    spec = load_spec(tiny_model(tmp_path, "gemma4"))
    tiny = selftest._tiny(spec)
    assert [(kind.head_dim, kind.keys_of) for kind in tiny.kinds] == [
        *((16, 0), (32, 1)),
        *((16, 0), (32, 1)),
    ]
    check(reference_ops(), spec, torch.float32, CPU)
    check(cpu_ops(1), spec, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", range(4), ids=["dense", "experts", "convolutions", "delta"])
def test_check_compares_steps_of_packed_weights(dtype: torch.dtype, which: int) -> None:
    ops, spec = cpu_ops(1), usual_specs()[which]
    check(ops, spec, dtype, CPU)
    for name, message in (("logits", "a step"), ("sample_logits", "a draw"), ("sample", "a draw")):
        usual = getattr(ops, name)
        broken = replace(ops, **{name: lambda *args, n=name, u=usual: BREAK[n](u(*args))})
        with pytest.raises(Differs, match=f"{message} is wrong"):
            check(broken, spec, dtype, CPU)


def test_kernel_sets_match_the_build_of_an_engine() -> None:
    builds = [(each.build, each.dtype) for each in kernel_sets() if each.backend == "cpu"]
    for dtype in (torch.float32, torch.bfloat16):
        assert (best_instruction_set(), dtype) in builds


@pytest.mark.thorough
def test_info_selftest_prints_one_line_per_set() -> None:
    result = CliRunner().invoke(app, ["info", "--selftest"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines == [f"{each}: agrees with the reference" for each in kernel_sets()]


class _Crashing(KernelSet):
    """Kernels with instructions that the processor lacks."""

    def ops(self) -> Any:
        os.kill(os.getpid(), signal.SIGILL)


def _crashing() -> list[KernelSet]:
    return [_Crashing("cpu", "made up", "cpu", torch.float32)]


def _unknown() -> list[KernelSet]:
    return [KernelSet("cpu", "mmx", "cpu", torch.float32)]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (_crashing, "cpu made up, float32, cpu: DIFFERS: crashed (SIGILL)"),
        (_unknown, "DIFFERS: failed: KernelsUnavailable: instruction set 'mmx' is unknown"),
    ],
)
def test_info_selftest_exits_with_1_for_a_bad_set(
    monkeypatch: pytest.MonkeyPatch, sets: Callable[[], list[KernelSet]], message: str
) -> None:
    monkeypatch.setattr(selftest, "kernel_sets", sets)
    result = CliRunner().invoke(app, ["info", "--selftest"])
    assert result.exit_code == 1
    assert message in result.output


def test_info_selftest_uses_the_widths_of_a_model(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def verdicts(specs: Any, _: Any) -> list[Any]:
        calls.extend(specs)
        return []

    monkeypatch.setattr(selftest, "selftest", verdicts)
    folder = tiny_llama(tmp_path)
    result = CliRunner().invoke(app, ["info", str(folder), "--selftest"])
    assert result.exit_code == 0, result.output
    assert calls == [load_spec(folder)]


def test_info_without_a_model_or_selftest_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 2
    assert "MODEL is missing" in result.output

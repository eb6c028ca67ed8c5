"""Rotary frequencies compared with the formulas in float64 and with transformers."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.models.rope import rope_table
from nano_inference.models.spec.model import RopeSpec
from nano_inference.models.spec.read import spec_from_config
from tests.models.tiny import llama_config

CALM = settings(deadline=None)
CPU = torch.device("cpu")

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with bounds": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn with a factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


# Factors of each frequency, as in GGUF files. Their number depends on the head.
def longrope(head_dim: int) -> dict[str, Any]:
    factors = [1.0 + 7.0 * i / head_dim for i in range(head_dim // 2)]
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 256,
    }


def spec_of(
    scaling: dict[str, Any], theta: float, max_position: int, head_dim: int = 16
) -> RopeSpec:
    config = llama_config(max_position=max_position) | {
        "head_dim": head_dim,
        "rope_parameters": scaling | {"rope_theta": theta},
    }
    return spec_from_config(config).ropes[0]


def table(spec: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    return rope_table(spec, head_dim, num_positions, CPU)


@CALM
@given(
    theta=st.sampled_from([1e4, 5e5]),
    half=st.integers(1, 64),
    positions=st.integers(1, 300),
    factor=st.floats(1, 50),
)
def test_default_and_linear_are_powers_of_theta(
    theta: float, half: int, positions: int, factor: float
) -> None:
    inverse = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    for spec, stretch in [
        (RopeSpec(theta=theta), 1.0),
        (RopeSpec(theta=theta, kind="linear", factor=factor), factor),
    ]:
        cos, sin = table(spec, 2 * half, positions)
        assert cos.shape == sin.shape == (positions, half)
        assert cos.dtype == sin.dtype == torch.float32
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse / stretch
        torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=1e-4)
        torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=1e-4)


@CALM
@given(
    short=st.integers(1, 100), longer=st.integers(1, 100), kind=st.sampled_from(sorted(SCALINGS))
)
def test_longer_table_begins_with_the_shorter_one(short: int, longer: int, kind: str) -> None:
    spec = spec_of(SCALINGS[kind], 1e4, 512)
    first, second = table(spec, 16, short), table(spec, 16, short + longer)
    assert all(torch.equal(a, b[:short]) for a, b in zip(first, second, strict=True))


def test_llama3_keeps_high_frequencies_and_stretches_low_ones() -> None:
    plain, _ = table(RopeSpec(theta=1e4), 64, 2)
    spec = spec_of(SCALINGS["llama3"], 1e4, 2048)
    inverse = 1e4 ** -(torch.arange(32, dtype=torch.float64) / 32)
    turns = 256 * inverse / (2 * math.pi)
    cos, _ = table(spec, 64, 2)
    assert (turns > 4).any()
    assert (turns < 1).any()
    assert ((turns > 1) & (turns < 4)).any()
    torch.testing.assert_close(cos[:, turns > 4], plain[:, turns > 4], rtol=0, atol=1e-6)
    slow = turns < 1
    torch.testing.assert_close(cos[1, slow].double(), (inverse[slow] / 8).cos(), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", [*sorted(SCALINGS), "longrope"])
def test_frequencies_agree_with_transformers(kind: str, theta: float, head_dim: int) -> None:
    # slow to import
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, max_position = longrope(head_dim) if kind == "longrope" else SCALINGS[kind], 1024
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rope_parameters=scaling | {"rope_theta": theta},
        )
    )
    inverse, attention_factor = theirs.inv_freq, theirs.attention_scaling
    spec = spec_of(scaling, theta, max_position, head_dim)
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-6)
    angles = torch.arange(300, dtype=torch.float64)[:, None] * inverse.double()
    cos, sin = table(spec, head_dim, 300)
    # Angles up to 300 have a float32 rounding error of 2e-5.
    torch.testing.assert_close(cos.double(), angles.cos() * attention_factor, rtol=0, atol=1e-4)
    torch.testing.assert_close(sin.double(), angles.sin() * attention_factor, rtol=0, atol=1e-4)
    one_cos, one_sin = (part[1].double() / attention_factor for part in (cos, sin))
    torch.testing.assert_close(
        torch.atan2(one_sin, one_cos), inverse.double(), rtol=2e-6, atol=2e-7
    )


TABLE = """
import dataclasses, hashlib, torch
from nano_inference import EngineConfig
from nano_inference.device.backends import numerics_of
from nano_inference.models.rope import rope_table
from nano_inference.models.spec.rope import RopeSpec
from nano_inference.ops.reference.backend import reference_ops
device = torch.device("cpu")
tables = [rope_table(RopeSpec(theta=theta), 128, 999, device) for theta in (1e6, 1.5e5)]
ops = dataclasses.replace(reference_ops(), name="cpu")  # the reference's names all that MKL sees
print(numerics_of(EngineConfig("m"), ops, torch.float32, device).fingerprint)
print(hashlib.sha256(b"".join(bytes(each.numpy()) for pair in tables for each in pair)).hexdigest())
"""


@pytest.mark.thorough
def test_fingerprint_changes_with_the_table_bits() -> None:
    results: dict[str, set[str]] = {}
    capability = torch.backends.cpu.get_cpu_capability().lower()
    for vectors in {"default", capability} | ({"avx2"} if capability == "avx512" else set()):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": vectors}
        child = subprocess.run(
            [sys.executable, "-c", TABLE], env=environment, capture_output=True, text=True
        )
        assert child.returncode == 0, child.stderr
        fingerprint, table = child.stdout.split()
        results.setdefault(fingerprint, set()).add(table)
    assert all(len(tables) == 1 for tables in results.values())

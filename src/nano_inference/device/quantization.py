"""Resolution of `EngineConfig.quantization="auto"`, and hints at a faster setting."""

import math
from dataclasses import replace

from nano_inference.arrays import HOST, Device, Dtype, dtype_for, dtype_name
from nano_inference.checkpoints.folders import describe_model, gguf_of, load_spec
from nano_inference.checkpoints.gguf.codes import KINDS
from nano_inference.checkpoints.gguf.file import tensors_of
from nano_inference.config import MTP, SELF, EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.device.backends import LEAST, bf16_gains, no_cpu_kernels_for, wants_cpu_kernels
from nano_inference.device.memory import gibibytes
from nano_inference.ops.cpu.build import available_instruction_set
from nano_inference.ops.formats import FILE, FORMATS

LEAST_IN_BLOCKS = 0.5  # least share of weights in blocks that the kernels multiply
_CAUTION = "answers may differ slightly"


def settle_quantization(config: EngineConfig, device: Device) -> EngineConfig:
    """Return the config with `quantization="auto"` resolved.

    `"auto"` becomes `"file"` for a `.gguf` file whose blocks the CPU kernels multiply, unless
    another option needs plain weights. Otherwise it becomes None.

    Raises `ModelLoadError` for a `.gguf` file that cannot be read.
    """
    if config.quantization != "auto":
        return config
    in_blocks = _allows_blocks(config) and device.type == "cpu" and _multiplies_blocks(config)
    return replace(config, quantization=FILE if in_blocks else None)


def blocks_bytes(model_path: str) -> int:
    """Return the bytes of a model's matrices as `"file"` holds them.

    Return 0 for other files than `.gguf`, or if the kernels multiply less than half of the weights
    in blocks.
    """
    file = gguf_of(model_path)
    if file is None:
        return 0
    matrices = [each for each in tensors_of(file).values() if len(each.shape) > 1]
    sizes = [math.prod(each.shape) for each in matrices]
    kinds = [KINDS.get(getattr(each.kind, "name", str(each.kind))) for each in matrices]
    coded = [(size, kind) for size, kind in zip(sizes, kinds, strict=True) if kind is not None]
    if sum(size for size, _ in coded) < LEAST_IN_BLOCKS * sum(sizes):
        return 0
    plain = sum(sizes) - sum(size for size, _ in coded)
    return 2 * plain + int(sum(size * FORMATS[kind.form].bytes_per_weight for size, kind in coded))


def told_weights(
    config: EngineConfig,
    asked: EngineConfig,
    dtype: Dtype,
    weights: int,
    device: Device,
) -> str:
    """Return a description of an engine's dtype and weight memory.

    Args:
        config: Resolved config of the engine.
        asked: Original config. The hint does not contradict its explicit options.
        dtype: Dtype of the unquantized weights.
        weights: Bytes of all weights.
        device: Device of the weights.
    """
    codes = "" if config.codes is None else f", weights as codes ({config.codes})"
    faster = faster_setting(config, asked, dtype, weights, device)
    hint = "" if faster is None else f"; {faster}"
    return f"{dtype_name(dtype)}{codes}, {gibibytes(weights)}{hint}"


def faster_setting(
    config: EngineConfig,
    asked: EngineConfig,
    dtype: Dtype,
    weights: int,
    device: Device,
) -> str | None:
    """Return a setting that decodes faster in less memory on the CPU kernels, with its gain.

    Return None if there is no such setting, the caller has ruled it out, or the model is too small
    to gain. The arguments are those of `told_weights`.
    """
    runs_kernels = wants_cpu_kernels(config) and available_instruction_set() is not None
    if device.type != "cpu" or config.codes is not None or not runs_kernels or weights < LEAST:
        return None
    is_wide = dtype_name(dtype) != "bfloat16"
    ranks = config.tensor_parallel * config.pipeline_parallel * config.context_parallel
    is_open = ranks == 1 and asked.quantization == "auto"
    if is_open and (size := blocks_bytes(config.model_path)):
        gain = f"{gibibytes(size)}, about {4 if is_wide else 2}x faster"
        return f"--quantization file: {gain}; {_CAUTION}"
    if is_wide and not asked.names_dtype and bf16_gains(config, device):
        return f"--dtype bfloat16: {gibibytes(weights // 2)}, about 2x faster; {_CAUTION}"
    return None


def _allows_blocks(config: EngineConfig) -> bool:
    """Return True if no other option needs plain weights.

    Options that need plain weights are a dtype, several ranks, another backend, a reference model,
    quantized drafts, and a draft model without blocks.
    """
    ranks = config.tensor_parallel * config.pipeline_parallel
    ranks *= config.context_parallel * config.expert_parallel
    others = (config.ref_model_path, config.draft_quantization)
    return (
        not config.names_dtype
        and ranks == 1
        and all(each is None for each in others)
        and wants_cpu_kernels(config)
        and (config.draft_model in (None, SELF, MTP) or blocks_bytes(str(config.draft_model)) > 0)
    )


def _multiplies_blocks(config: EngineConfig) -> bool:
    """Return True if the CPU kernels run this model in blocks."""
    if not blocks_bytes(config.model_path) or available_instruction_set() is None:
        return False
    spec = load_spec(describe_model(config.model_path))
    asked = replace(config, quantization=FILE)
    return no_cpu_kernels_for(asked, {POLICY: spec}, dtype_for(HOST, "bfloat16"), HOST) is None

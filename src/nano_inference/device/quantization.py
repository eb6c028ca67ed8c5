"""What `EngineConfig.quantization="auto"` means for a model on this machine, decided here only; and
the line that names a faster setting.
"""

import math
from dataclasses import replace

import torch

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS
from nano_inference.checkpoints.folders import describe_model, gguf_of, load_spec
from nano_inference.checkpoints.gguf.codes import KINDS
from nano_inference.checkpoints.gguf.file import tensors_of
from nano_inference.checkpoints.names import plain_name
from nano_inference.config import SELF, EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.device.backends import bf16_gains, no_cpu_kernels_for, wants_cpu_kernels
from nano_inference.device.memory import gibibytes
from nano_inference.ops.cpu.build import available_instruction_set
from nano_inference.ops.formats import FILE, FORMATS

LEAST_IN_BLOCKS = 0.5  # share of a model's weights
_CAUTION = "answers may differ slightly"
LEAST = 32 << 20  # bytes of weights: fewer stay in the processor's caches, whatever they are


def settle_quantization(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The config with `quantization="auto"` replaced by what it means here: `"file"` for a `.gguf`
    file whose blocks the CPU kernels multiply, unless another option needs plain weights, else
    None.

    Raises `ModelLoadError` for a `.gguf` file that cannot be read.
    """
    if config.quantization != "auto":
        return config
    in_blocks = _allows_blocks(config) and device.type == "cpu" and _multiplies_blocks(config)
    return replace(config, quantization=FILE if in_blocks else None)


def blocks_bytes(model_path: str) -> int:
    """Bytes of a model's matrices as `"file"` holds them; 0: it is no `.gguf` file, or fewer than
    half of its weights are in blocks that the kernels multiply.
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
    dtype: torch.dtype,
    weights: int,
    device: torch.device,
) -> str:
    """An engine's dtype and the memory of its weights, for a line.

    Args:
        config: of the engine, as it is settled.
        asked: the config before it was settled; options that it names stay as they are.
        dtype: of the weights that are no codes.
        weights: bytes that they all take.
        device: where they are.
    """
    codes = "" if config.codes is None else f", weights as codes ({config.codes})"
    faster = faster_setting(config, asked, dtype, weights, device)
    hint = "" if faster is None else f"; {faster}"
    return f"{_name(dtype)}{codes}, {gibibytes(weights)}{hint}"


def faster_setting(
    config: EngineConfig,
    asked: EngineConfig,
    dtype: torch.dtype,
    weights: int,
    device: torch.device,
) -> str | None:
    """The setting that would make the tokens of one answer come faster in less memory on the CPU
    kernels, with what it saves; None: there is none, you have ruled it out, or the model is too
    small to gain. Arguments are those of `told_weights`.
    """
    runs_kernels = wants_cpu_kernels(config) and available_instruction_set() is not None
    if device.type != "cpu" or config.codes is not None or not runs_kernels or weights < LEAST:
        return None
    is_wide = dtype != torch.bfloat16
    ranks = config.tensor_parallel * config.pipeline_parallel * config.context_parallel
    is_open = ranks == 1 and asked.quantization == "auto"
    if is_open and (size := blocks_bytes(config.model_path)):
        gain = f"{gibibytes(size)}, about {4 if is_wide else 2}x faster"
        return f"--quantization file: {gain}; {_CAUTION}"
    if is_wide and asked.dtype == "auto" and bf16_gains(config, device):
        return f"--dtype bfloat16: {gibibytes(weights // 2)}, about 2x faster; {_CAUTION}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _allows_blocks(config: EngineConfig) -> bool:
    """Whether no other option asks for plain weights: for weights of a dtype, for several ranks,
    for models beside this one that a trainer compares it with or that have no blocks. A model that
    a package carries is named like a checkpoint, and trainers name it: it is plain too.
    """
    ranks = config.tensor_parallel * config.pipeline_parallel
    ranks *= config.context_parallel * config.expert_parallel
    others = (config.ref_model_path, config.draft_quantization)
    return (
        config.dtype == "auto"
        and plain_name(config.model_path) not in EMBEDDED_MODELS
        and ranks == 1
        and all(each is None for each in others)
        and wants_cpu_kernels(config)
        and (config.draft_model in (None, SELF) or blocks_bytes(str(config.draft_model)) > 0)
    )


def _multiplies_blocks(config: EngineConfig) -> bool:
    """Whether the CPU kernels run this model in blocks."""
    if not blocks_bytes(config.model_path) or available_instruction_set() is None:
        return False
    spec = load_spec(describe_model(config.model_path))
    asked = replace(config, quantization=FILE)
    cpu = torch.device("cpu")
    return no_cpu_kernels_for(asked, {POLICY: spec}, torch.bfloat16, cpu) is None

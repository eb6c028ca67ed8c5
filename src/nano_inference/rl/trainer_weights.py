"""The weights of a trainer's `transformers` model, whole and under the checkpoint's names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.errors import ConfigError

# accelerate's names of setups in which every process holds all weights.
_WHOLE = frozenset(
    {
        "NO",
        "MULTI_CPU",
        "MULTI_GPU",
        "MULTI_NPU",
        "MULTI_XPU",
        "MULTI_MLU",
        "MULTI_MUSA",
        "MULTI_SDAA",
    }
)


def require_whole(accelerator: Any) -> None:
    """Raise `ConfigError` if each process of this `accelerate.Accelerator` holds only a part of the
    model.
    """
    kind = accelerator.distributed_type
    name = str(getattr(kind, "value", kind))
    if name not in _WHOLE:
        raise ConfigError(
            f"a trainer under {name} holds only a part of the weights in each process, but this "
            "engine needs them whole; train in one process, or data-parallel (DDP)."
        )


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield tensors by the checkpoint's names, as the model computes with them.

    The tensors are valid until the context ends. Adapters (PEFT) are merged meanwhile, and
    afterwards the model has its original bits again. Raises `ConfigError` if the weights cannot be
    determined: if the model is quantized, or if an adapter does not change weights.
    """
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise ConfigError(
            "the trainer's model is quantized (4 or 8 bit), so its weights cannot be sent; load it "
            "unquantized."
        )
    if not hasattr(model, "peft_config"):
        yield dict(model.state_dict())
        return
    with _merged(model) as base:
        yield base


@contextmanager
def _merged(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the state of a `PeftModel` with merged adapters, under the base model's names."""
    if not hasattr(model, "merge_adapter"):
        kinds = ", ".join(
            sorted({str(getattr(c, "peft_type", c)) for c in model.peft_config.values()})
        )
        raise ConfigError(
            f"an adapter of type {kinds} cannot be merged into weights; use LoRA, or train all "
            "weights."
        )
    inside: Mapping[str, Tensor] = model.get_base_model().state_dict()
    prefix: str = model.base_model.prefix
    _require_untied(inside)
    if any(getattr(module, "merged", False) for module in model.modules()):
        yield _base_weights(inside, prefix)  # the caller merged the adapters, so leave them merged
        return
    # Merging adds and unmerging subtracts, which is not exact. Restore the tensors afterwards.
    kept = {name: tensor.clone() for name, tensor in inside.items() if ".base_layer." in name}
    try:
        model.merge_adapter()
        yield _base_weights(inside, prefix)
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, tensor in kept.items():
                inside[name].copy_(tensor)


def _require_untied(inside: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` if an adapted tensor is also used under another name.

    The model applies the adapter to only one of the uses. Merged, it would apply to both.
    """
    owners = {tensor.data_ptr(): name for name, tensor in inside.items() if ".base_layer." in name}
    for name, tensor in inside.items():
        if (owner := owners.get(tensor.data_ptr(), name)) != name and tensor.numel():
            raise ConfigError(
                f"an adapter of {_base_name(owner)!r}, which is also {_base_name(name)!r} in this "
                "model, cannot be merged into weights; leave it out of target_modules."
            )


def _base_weights(inside: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        _base_name(name): tensor for name, tensor in inside.items() if not _is_adapter(name, prefix)
    }


def _is_adapter(name: str, prefix: str) -> bool:
    return prefix in name or ".original_module." in name


def _base_name(name: str) -> str:
    """Remove PEFT's parts of a name.

    Examples: `model.layers.0.mlp.up_proj.base_layer.weight`,
    `lm_head.modules_to_save.default.weight`. A fully trained module is under its adapter's name.
    """
    before, inserted, after = name.partition(".modules_to_save.")
    whole = f"{before}.{after.partition('.')[2]}" if inserted else name
    return whole.replace(".base_layer.", ".")

"""The weights of a trainer's `transformers` model as an engine takes them: whole, under the
checkpoint's names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.errors import ConfigError

# How accelerate calls the set-ups in which every process holds all weights.
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
    """Raise `ConfigError` where a process of this `accelerate.Accelerator` holds only a part of the
    model.
    """
    kind = accelerator.distributed_type
    name = str(getattr(kind, "value", kind))
    if name not in _WHOLE:
        raise ConfigError(
            f"a trainer under {name} holds only a part of the weights in each process, and this "
            "engine is given them "
            "whole; train in one process, or data-parallel (DDP)."
        )


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Tensors by the checkpoint's names, as the model computes with them; valid until the context
    ends.

    Adapters (PEFT) are merged into what they adapt meanwhile; after it the model has its own bits
    again. Raises `ConfigError` for a model whose weights cannot be told: a quantized one, an
    adapter that is no change of weights.
    """
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise ConfigError(
            "the trainer's model is quantized (4 or 8 bit); load it unquantized to hand on its "
            "weights."
        )
    if not hasattr(model, "peft_config"):
        yield dict(model.state_dict())
        return
    with _merged(model) as base:
        yield base


@contextmanager
def _merged(model: Any) -> Iterator[dict[str, Tensor]]:
    """State of a `PeftModel` with its active adapters merged, under the names of the base model."""
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
        yield _base_weights(inside, prefix)  # the caller's merge, which stays
        return
    # Merging adds and unmerging subtracts, which is not exact: what is touched is put back as it
    # was.
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
    """Raise `ConfigError` where an adapter is of a tensor that stands under another name too: the
    model computes with it in one place alone, and merged it would be in both.
    """
    owners = {tensor.data_ptr(): name for name, tensor in inside.items() if ".base_layer." in name}
    for name, tensor in inside.items():
        if (own := owners.get(tensor.data_ptr(), name)) != name and tensor.numel():
            raise ConfigError(
                f"an adapter of {_base_name(own)!r}, which is {_base_name(name)!r} too in this "
                "model, cannot be merged into weights; leave it out of target_modules."
            )


def _base_weights(inside: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        _base_name(name): tensor for name, tensor in inside.items() if not _is_adapter(name, prefix)
    }


def _is_adapter(name: str, prefix: str) -> bool:
    return prefix in name or ".original_module." in name


def _base_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.base_layer.weight`, `lm_head.modules_to_save.default.weight`:
    without what PEFT adds.

    A module that is trained whole stands under the name of its adapter.
    """
    before, inserted, after = name.partition(".modules_to_save.")
    whole = f"{before}.{after.partition('.')[2]}" if inserted else name
    return whole.replace(".base_layer.", ".")

"""`with_mtp` adds a checkpoint's multi-token prediction layer to a spec, and `mtp_layer` describes
that layer as a model.
"""

from dataclasses import fields, replace

from nano_inference.errors import ConfigError
from nano_inference.models.spec.families import ARCHITECTURES
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.mtp import MtpSpec


def with_mtp(spec: ModelSpec) -> ModelSpec:
    """Return a model's spec with its multi-token prediction layer. Raise `ConfigError` if the
    layer of this family is not known.
    """
    family = ARCHITECTURES[spec.architecture].mtp
    if family is None:
        known = ", ".join(name for name, each in ARCHITECTURES.items() if each.mtp is not None)
        raise ConfigError(
            f"draft_model='mtp' is not possible for {spec.architecture}: multi-token prediction "
            f"layers are known only for {known}; use speculation='suffix'."
        )
    return replace(spec, mtp=_numbered(family, spec.num_layers))


def mtp_layer(spec: ModelSpec) -> ModelSpec:
    """Return the decoder layer of a model's multi-token prediction layer, as a model of one layer.

    It attends to all tokens, and has experts if the model has any.
    """
    moe = None if spec.moe is None else replace(spec.moe, layers=(True,))
    return replace(
        spec,
        num_layers=1,
        ropes=spec.ropes[-1:],
        windows=(0,),
        moe=moe,
        state=None,
        is_text_part=False,
        quantisation=None,
        mtp=None,
    )


def _numbered(family: MtpSpec, last: int) -> MtpSpec:
    """Return a family's row for a model with `last` layers."""
    row = {each.name: getattr(family, each.name) for each in fields(family)}
    for name, value in row.items():
        if isinstance(value, str):
            row[name] = value.format(last=last)
        elif isinstance(value, tuple):
            row[name] = tuple(each.format(last=last) for each in value)
    return MtpSpec(**row)

"""Row by row: embedding, RMS norm with the residual stream, the MLP's gate, and what a step's inputs become."""

from torch import Tensor

from nano_inference.ops import reference
from nano_inference.ops.backend import Norm


def embed(input_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """See `Ops.embed`."""
    return reference.embed(input_ids, weight, scale)


def rms_norm(x: Tensor | None, residual: Tensor, norm: Norm, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """See `Ops.rms_norm`. The residual that is returned is a new tensor."""
    return reference.rms_norm(x, residual, norm, scale)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """See `Ops.gate`."""
    return reference.gate(gate_up, activation)


def relay_tokens(input_ids: Tensor, sources: Tensor, tokens: Tensor) -> None:
    """Rows whose token the step before has drawn: input_ids[i] = tokens[sources[i]] where sources[i] >= 0, in place.

    Args:
        input_ids: int64 [N].
        sources: int64 [N], -1 where the host knew the token.
        tokens: int64 [R], of the step before.
    """
    known = sources < 0
    input_ids.copy_(input_ids.where(known, tokens[sources.clamp(min=0)]))


def make_noise_keys(streams: Tensor, positions: Tensor, keys: Tensor) -> None:
    """`sampling.noise.stream_keys` on the device: int64 [R] (bits of uint64), int64 [R] -> keys int64 [R, 2], filled."""
    from nano_inference.sampling.noise import stream_keys

    keys.copy_(_from_numpy(stream_keys(streams.cpu().numpy().view("uint64"), positions.cpu().numpy().astype("uint64"))))


def _from_numpy(array) -> Tensor:
    import torch

    return torch.from_numpy(array)

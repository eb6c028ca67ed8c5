"""`ParamSpec`: one parameter of the decoder, its checkpoint tensors, and how ranks divide it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nano_inference.ops.formats import QUANTIZATIONS, Format, Stack
from nano_inference.ops.settings import Latent

# Quantization of weights: one of `QUANTIZATIONS`, or the format of each parameter by name.
Formats = str | Mapping[str, Format | Stack] | None


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor, and the part of it that goes into a parameter.

    Attributes:
        name: Name in the checkpoint.
        shape: Shape in the checkpoint.
        axis: Axis along which parts are taken.
        parts: Parts to take, in order, as [start, stop). None: the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the parts together."""
        if self.parts is None:
            return self.shape
        size = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


class Fused(NamedTuple):
    """A tensor that holds all sources of a parameter.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        axes: Sizes to reshape it to. Empty: the sources' rows are stacked.
        order: Permutation of these axes. After it, the leading axes count the sources, and the
            remaining axes are those of one source.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the decoder, as one rank holds it.

    Attributes:
        name: Name in the decoder.
        shape: Shape of all sources together.
        sources: Checkpoint tensors, stacked along axis 0.
        keep_float32: Stored as float32 even if the model has another dtype.
        tied: Checkpoint name of a head that must equal the only source. None: no such head.
        other_names: Alternative checkpoint names of a source or the tied head: (usual, other).
        fused: Tensors that hold all sources, in order, in a trainer's memory or in checkpoints.
        latent: Sizes of latents, for a matrix of `LatentOps`. None: any other parameter.
        codes: Part of the model whose quantization applies. An untied `"embedding"` only has the
            codes of a file. None: the parameter stays unquantized.
        segments: Bounds of its columns' segments, as the decoder passes them to `Ops.linear`.
        stacks: If True, its sources may keep different formats (`Stack`).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    keep_float32: bool = False
    tied: str | None = None
    fused: tuple[Fused, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    latent: Latent | None = None
    codes: Literal["layers", "head", "embedding"] | None = None
    segments: tuple[int, ...] | None = None
    stacks: bool = False

    def form(self, quantization: "Formats") -> Format | Stack | None:
        """Return the format under `EngineConfig.quantization`, or None if unquantized."""
        if quantization is None or self.codes is None:
            return None
        if not isinstance(quantization, str):
            return quantization.get(self.name)
        layers, head = QUANTIZATIONS.get(quantization, (None, None))  # "file" has no row
        return {"layers": layers, "head": head, "embedding": None}[self.codes]

"""`ParamSpec`: one parameter of the decoder, what it is fused from, and how it may be split."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nano_inference.ops.formats import QUANTIZATIONS, Format
from nano_inference.ops.settings import Latent

# How weights are quantised: one of `QUANTIZATIONS`, or the format of each parameter by its name.
Formats = str | Mapping[str, Format] | None


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor, and what of it goes into a parameter.

    Attributes:
        name: in the checkpoint.
        shape: in the checkpoint.
        axis: along which parts of it are taken.
        parts: these, in order, as [start, stop); None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    parts: tuple[tuple[int, int], ...] | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what is taken."""
        if self.parts is None:
            return self.shape
        size = sum(stop - start for start, stop in self.parts)
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


class Fused(NamedTuple):
    """A tensor that holds all sources of a parameter.

    Attributes:
        name: of it.
        shape: of it.
        axes: as these sizes it is looked at; none: the sources' rows stand one below the other.
        order: and in this order of them, the sources are its leading axes, in their order, and what
            is left is one source.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the decoder, as one rank holds it.

    Attributes:
        name: the decoder's name for it.
        shape: all sources together.
        sources: what is stacked along axis 0 to make it.
        keep_float32: held in float32 whatever dtype the model has.
        tied: checkpoint name of a head that must equal the only source; None: there is none.
        other_names: what a checkpoint may call a source or the tied head instead: ours, theirs.
        fused: each tensor that holds all sources, in order, in a trainer's memory or in
            checkpoints.
        latent: it is what `LatentOps` multiplies by.
        codes: it may be quantised, in the format of layers or of the head; None: it stays as it is.
        segments: bounds of its columns' segments, as the decoder gives them to `Ops.linear`.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    keep_float32: bool = False
    tied: str | None = None
    fused: tuple[Fused, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    latent: Latent | None = None
    codes: Literal["layers", "head"] | None = None
    segments: tuple[int, ...] | None = None

    def form(self, quantization: "Formats") -> Format | None:
        """Its format under `EngineConfig.quantization`; None: it has none."""
        if quantization is None or self.codes is None:
            return None
        if not isinstance(quantization, str):
            return quantization.get(self.name)
        layers, head = QUANTIZATIONS.get(quantization, (None, None))  # a file says it itself
        return {"layers": layers, "head": head}[self.codes]

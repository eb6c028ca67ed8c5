"""What the service trains and samples from: an engine and LoRA policies on it. The only module of
the service that knows the engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from nano_inference.types import SamplingParams, TrainingSample

ALPHA = 32.0  # the client names a rank and no alpha


class Policy(Protocol):
    """An adapter in training: a module whose parameters are A and B of every adapted projection,
    float32. Calls come from one thread.
    """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Always in the same order."""
        ...

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        from_position: int,
        targets: Sequence[NDArray[np.int64]],
    ) -> list[Tensor]:
        """Logprobs of each sequence's targets, which stand in the place of its tokens from a
        position on: [tokens], or [tokens, k] for k in each place. Differentiable.
        """
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write a PEFT folder."""
        ...

    def load(self, folder: Path) -> None:
        """Read one into the parameters, whole or not at all."""
        ...


@dataclass(frozen=True)
class Adapter:
    """Which adapter a model is.

    Attributes:
        rank: of A and B.
        seed: of the first values of A.
        attention, mlp, unembed: whether it adapts the projections of attention, those of MLPs and
            experts, the head.
    """

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


class Base(Protocol):
    """A base model that serves adapters.

    Attributes:
        model: as the service was told: a name, a folder.
        folder: of the model, with its tokenizer.
        architecture: its name in `config.json`.
        max_model_len: tokens of a sequence.
        vocab_size: ids are below it.
    """

    model: str
    folder: str
    architecture: str
    max_model_len: int
    vocab_size: int

    def new_policy(self, name: str, adapter: Adapter) -> Policy:
        """A new adapter, at its first values."""
        ...

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serve a PEFT folder's adapter by this name, which is new."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Serve it no more."""
        ...

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, num_samples: int, adapter: str | None
    ) -> list[TrainingSample]:
        """Samples of one prompt; cancelling aborts them."""
        ...

    def close(self) -> None:
        """Shut the engine down."""
        ...

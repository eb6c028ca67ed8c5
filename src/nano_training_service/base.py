"""Interfaces of the base model and its LoRA policies. The other modules of the service reach the
engine only through them. `engine_base` implements them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from nano_inference.types import SamplingParams, TrainingSample

ALPHA = 32.0  # the client sends a rank but no alpha


class Policy(Protocol):
    """An adapter in training: a module whose parameters are A and B of every adapted projection,
    float32. Calls come from one thread.
    """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, always in the same order."""
        ...

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        from_position: int,
        targets: Sequence[NDArray[np.int64]],
    ) -> list[Tensor]:
        """Return the logprobs of each sequence's targets, differentiable. The targets replace the
        sequence's tokens, starting at `from_position`: [tokens], or [tokens, k] for k targets per
        position.
        """
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write a PEFT folder."""
        ...

    def load(self, folder: Path) -> None:
        """Load a PEFT folder into the parameters, all of them or none."""
        ...


@dataclass(frozen=True)
class Adapter:
    """Shape and targets of an adapter.

    Attributes:
        rank: Rank of A and B.
        seed: Seed for the initial values of A.
        attention: True if the attention projections are adapted.
        mlp: True if the projections of MLPs and experts are adapted.
        unembed: True if the head is adapted.
    """

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


class Base(Protocol):
    """A base model that serves adapters.

    Attributes:
        model: Name or folder that the service was started with.
        folder: Folder of the model and its tokenizer.
        architecture: Name of the architecture in `config.json`.
        max_model_len: Maximum tokens of a sequence.
        vocab_size: Number of token ids.
    """

    model: str
    folder: str
    architecture: str
    max_model_len: int
    vocab_size: int

    def new_policy(self, name: str, adapter: Adapter) -> Policy:
        """Return a new adapter with initial values."""
        ...

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapter of a PEFT folder under a new name."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter."""
        ...

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, num_samples: int, adapter: str | None
    ) -> list[TrainingSample]:
        """Return samples of one prompt. Cancelling the call aborts them."""
        ...

    def close(self) -> None:
        """Shut the engine down."""
        ...

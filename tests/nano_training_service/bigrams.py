"""A base model of two matrices: the logits after a token are (W + B A / rank) times its embedding.
It tests the service's handling of models in milliseconds.
"""

import asyncio
import json
import time
import weakref
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano_inference.errors import ConfigError
from nano_inference.types import SamplingParams, TopLogprobs, TrainingSample
from nano_training_service.base import Adapter

VOCAB, WIDTH = 32, 8


class BigramPolicy(nn.Module):
    """A `Policy` whose adapter is one low-rank matrix."""

    def __init__(self, base: "Bigrams", adapter: Adapter) -> None:
        super().__init__()
        self.base, self.adapter = base, adapter
        chance = torch.Generator().manual_seed(adapter.seed)
        self.lora_a = nn.Parameter(torch.randn(adapter.rank, WIDTH, generator=chance))
        self.lora_b = nn.Parameter(torch.zeros(base.vocab_size, adapter.rank))

    def logprobs(
        self, sequences: list[list[int]], *, from_position: int, targets: list[NDArray[np.int64]]
    ) -> list[Tensor]:
        time.sleep(self.base.delay)
        found = [self.base.rows(ids[:-1], self.lora_a, self.lora_b) for ids in sequences]
        return [
            rows[from_position - 1 :].gather(1, columns.view(len(columns), -1)).view(columns.shape)
            for rows, columns in zip(found, map(torch.tensor, targets), strict=True)
        ]

    def save_pretrained(self, folder: Path) -> None:
        tensors = {"a": self.lora_a.detach(), "b": self.lora_b.detach()}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": self.adapter.rank}))

    def load(self, folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            self.lora_a.copy_(tensors["a"])
            self.lora_b.copy_(tensors["b"])


class Bigrams:
    """A `Base` of two matrices.

    Attributes:
        delay: Seconds per batch.
        adapters: Adapters that are served now.
        policies: Policies in training.
    """

    def __init__(
        self, most: int = 4, *, vocab: int = VOCAB, longest: int = 64, folder: str = "bigrams"
    ) -> None:
        chance = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(vocab, WIDTH, generator=chance)
        self.weight = torch.randn(vocab, WIDTH, generator=chance)
        self.model = self.folder = folder
        self.architecture = "Bigrams"
        self.max_model_len, self.vocab_size = longest, vocab
        self.delay = 0.0
        self.policies: weakref.WeakSet[BigramPolicy] = weakref.WeakSet()
        self.most = most
        self.adapters: dict[str, tuple[Tensor, Tensor]] = {}

    def rows(self, ids: list[int], a: Tensor | None, b: Tensor | None) -> Tensor:
        """Return logprobs [n, VOCAB] of the token after each token."""
        weight = self.weight if a is None or b is None else self.weight + b @ a / len(a)
        return torch.stack([torch.log_softmax(weight @ self.embedding[each], 0) for each in ids])

    def new_policy(self, name: str, adapter: Adapter) -> BigramPolicy:
        if adapter.seed == 13:
            raise ConfigError("seed 13 cannot be made.")
        made = BigramPolicy(self, adapter)
        self.policies.add(made)
        return made

    def load_adapter(self, name: str, folder: Path) -> None:
        assert name not in self.adapters
        assert len(self.adapters) < self.most
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = tensors["a"], tensors["b"]

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def generate(
        self, prompt: list[int], params: SamplingParams, num_samples: int, adapter: str | None
    ) -> list[TrainingSample]:
        await asyncio.sleep(self.delay)
        a, b = self.adapters[adapter] if adapter else (None, None)
        return [self._sample(prompt, params, index, a, b) for index in range(num_samples)]

    def _sample(
        self,
        prompt: list[int],
        params: SamplingParams,
        index: int,
        a: Tensor | None,
        b: Tensor | None,
    ) -> TrainingSample:
        seed = params.seed if params.seed is not None else 1
        chance = torch.Generator().manual_seed(seed * 1000 + index)
        ids, logprobs, reason = list(prompt), [], "length"
        for _ in range(params.max_tokens):
            row = self.rows(ids[-1:], a, b)[0]
            ids.append(int(torch.multinomial(row.exp(), 1, generator=chance)))
            logprobs.append(float(row[ids[-1]]))
            if ids[-1] in params.stop_token_ids:
                reason = "stop"
                break
        rows = self.rows(prompt[:-1], a, b) if len(prompt) > 1 else torch.zeros(0, self.vocab_size)
        width = params.prompt_top_logprobs
        best = [each.topk(width) for each in rows]
        return TrainingSample(
            tuple(prompt),
            tuple(ids[len(prompt) :]),
            tuple(logprobs),
            None,
            0,
            reason,
            prompt_logprobs=(
                float("nan"),
                *(float(row[token]) for row, token in zip(rows, prompt[1:], strict=True)),
            ),
            prompt_top_logprobs=(
                TopLogprobs((), ()),
                *(
                    TopLogprobs(tuple(each.indices.tolist()), tuple(each.values.tolist()))
                    for each in best
                ),
            ),
        )

    def close(self) -> None:
        self.adapters.clear()

"""A fake of TRL's trainer around a real `transformers` model, with the attributes that the rollout
function reads.
"""

from collections import defaultdict
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

TEMPLATE = {"system": 10, "user": 11, "assistant": 12}


class DistributedType(StrEnum):
    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"


class Tokenizer:
    """A character's id is its code, from 33 on. A chat is one id per role, its text, and the
    assistant's id.
    """

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in each] for each in text]}

    def apply_chat_template(
        self,
        *,
        conversation: list[Any],
        chat_template: Any,
        enable_thinking: bool = False,
        **asked: Any,
    ) -> dict[str, list[list[int]]]:
        assert asked == {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        end = [TEMPLATE["assistant"], *([13] if enable_thinking else [])]
        return {
            "input_ids": [
                [i for m in chat for i in self._message(m)] + end for chat in conversation
            ]
        }

    @staticmethod
    def _message(message: dict[str, Any]) -> list[int]:
        return [TEMPLATE[message["role"]], *map(ord, message["content"])]


class FakeTrainer:
    """A single-process trainer with a float32 model. `step` and `write` act like an optimizer."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self.accelerator = SimpleNamespace(
            distributed_type=DistributedType.NO,
            process_index=0,
            device=torch.device("cpu"),
            unwrap_model=lambda model: model,
        )
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(
            seed=7, generation_kwargs=None, cache_implementation=None, per_device_train_batch_size=3
        )
        self.processing_class = Tokenizer()
        self.chat_template, self.chat_template_kwargs = None, {}
        self.tools: list[Any] = []
        self.eos_token_ids = [2]
        self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty = (
            1.0,
            1.0,
            0,
            None,
            1.0,
        )
        self.max_completion_length = 6
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        for name, value in changes.items():
            setattr(self.args if hasattr(self.args, name) else self, name, value)

    def step(self, scale: float = 0.02) -> None:
        """Take an optimizer step: change the weights and advance the step count."""
        self.write(scale)
        self.state.global_step += 1

    def write(self, scale: float = 0.02) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param += scale * torch.randn_like(param)

    def logprobs(self, prompt: list[int], completion: list[int]) -> Tensor:
        """Return the completion's logprobs by one forward pass of the current model at the
        trainer's temperature.
        """
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *completion]])).logits[
                0, len(prompt) - 1 : -1
            ]
        return (
            (logits / self.temperature)
            .log_softmax(-1)
            .gather(-1, torch.tensor(completion)[:, None])[:, 0]
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int,
    ) -> tuple[Tensor, None, None]:
        """Mimic TRL: padded, in batches, garbage where the mask is 0."""
        assert batch_size == self.args.per_device_train_batch_size
        logits = model(input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logprobs = (logits / self.temperature).log_softmax(-1)
        return logprobs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], None, None

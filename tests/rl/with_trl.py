"""Run TRL's real `GRPOTrainer` on a tiny model, in an environment that has TRL, and write records
into a folder.

`python -m tests.rl.with_trl full|lora|adapter|turns MODEL FOLDER` from the repository's root;
`torchrun` for more than one process. lora: the engine gets merged weights; adapter: a server gets
only the adapter; turns: a tool answers each completion twice.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from examples.adapter_rollout import AdapterRollout
from examples.tool_turns import ToolTurns
from nano_inference import EngineConfig, SamplingParams
from nano_inference.rl.trl import RolloutFunction
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server

TURNS = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
QUESTIONS = [
    [{"role": "user", "content": f"Say {word}."}]
    for word in ("a", "bee", "cedar", "dew", "eel", "fig")
]


class Checked:
    """Compare each rollout with a plain forward pass of a model with the trainer's weights."""

    def __init__(self, rollout: Any, folder: Path) -> None:
        self.rollout = rollout
        self.engine = rollout.engine if isinstance(rollout, RolloutFunction) else None
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.seen: list[dict[str, Any]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        before = self._computed()
        output = self.rollout(prompts, trainer)
        computed = self._computed() - before
        self.reference.load_state_dict(plain_weights(trainer.model))
        masks = output.get("env_mask", [[1] * len(ids) for ids in output["completion_ids"]])
        columns = (output["prompt_ids"], output["completion_ids"], output["logprobs"], masks)
        rows = [self._difference(*row) for row in zip(*columns, strict=True)]
        distinct = {tuple(ids) for ids in output["prompt_ids"]}
        self.seen.append(
            {
                "training": trainer.model.training,
                "step": trainer.state.global_step,
                "entries": len(prompts),
                "distinct": len(distinct),
                "computed_once": self.engine is None or computed == sum(map(len, distinct)),
                "versions": sorted(set(output["weight_version"])),
                "completions": output["completion_ids"],
                "difference": max(rows),
                "turns": [mask.count([0, 1]) for mask in map(edges, masks)],
            }
        )
        return output

    def _computed(self) -> int:
        return 0 if self.engine is None else self.engine.stats().prompt_tokens_computed

    @torch.no_grad()
    def _difference(
        self, prompt: list[int], completion: list[int], logprobs: list[float], mask: list[int]
    ) -> float:
        logits = self.reference(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        computed = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        differences = (computed - torch.tensor(logprobs)).abs()
        return float(differences[torch.tensor(mask) == 1].max())


def edges(mask: list[int]) -> list[list[int]]:
    """Return each two neighbours of a mask."""
    return [list(pair) for pair in pairwise(mask)]


class Turns:
    """Rollouts in which a tool answers two of the model's turns, with the trainer's weights."""

    def __init__(self, sender: RolloutFunction) -> None:
        self.sender = sender
        params = SamplingParams(max_tokens=6, stop_token_ids=frozenset({2}), seed=3)
        self.rollout = ToolTurns(sender.engine, lambda _: "Go on.", params, max_turns=3)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self.sender.sync(trainer)
        version = self.sender.engine.get_weight_version()
        return self.rollout(prompts, trainer) | {"weight_version": [version] * len(prompts)}


def plain_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights, or those of a copy with adapters merged and removed by PEFT."""
    if not hasattr(model, "peft_config"):
        return model.state_dict()
    return copy.deepcopy(model).merge_and_unload().state_dict()


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with padding, start and end ids."""
    specials = {"<pad>": 0, "<s>": 1, "</s>": 2}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = specials | {character: 3 + place for place, character in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def low_ids(
    completions: list[Any], completion_ids: list[list[int]], weight_version: list[int], **_: Any
) -> list[float]:
    """Return the share of tokens in the lower half of the ids. Rollout extras arrive here."""
    assert len(completions) == len(completion_ids) == len(weight_version)
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def run(kind: str, model: Path, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {}
    words = tokenizer(TURNS if kind == "turns" else TEMPLATE)
    words.save_pretrained(model)
    if kind in ("lora", "adapter"):
        from peft import LoraConfig  # pyright: ignore[reportMissingImports]

        options["peft_config"] = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False
        )
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        seed=5,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_iterations=2,  # a rollout serves two steps
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=6,
        num_generations_eval=2,
        report_to="none",
        save_strategy="no",
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = Dataset.from_list([{"prompt": question} for question in QUESTIONS])
    config = EngineConfig(str(model), dtype="float32", kv_cache_memory=2**24, num_threads=1)
    with rollout_of(kind, config) as rollout:
        checked = Checked(rollout, model)
        trainer = GRPOTrainer(
            policy, low_ids, args, data, data, words, rollout_func=checked, **options
        )
        before = base_weights(trainer.model)
        trainer.train()
        after = base_weights(trainer.model)
    # for steps that began with a rollout
    logged = [each for each in trainer.state.log_history if "reward" in each]
    return {
        "rollouts": checked.seen,
        "steps": trainer.state.global_step,
        "base_kept": all(torch.equal(before[name], tensor) for name, tensor in after.items()),
        "logged": [each.get("sampling/sampling_logp_difference/max") for each in logged],
        "rewards": [each["reward"] for each in logged],
    }


@contextmanager
def rollout_of(kind: str, config: EngineConfig) -> Iterator[Any]:
    if kind == "adapter":
        config = replace(config, max_loras=1, max_lora_rank=4)
        with running_server(config, ServerConfig(port=0, in_process=True, rl=True)) as url:
            yield AdapterRollout(url)
        return
    with RolloutFunction(config, log_mismatch=True) as rollout:
        yield Turns(rollout) if kind == "turns" else rollout


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if ".base_layer." in name
    }


if __name__ == "__main__":
    what, model_folder, out = sys.argv[1:]
    seen = run(what, Path(model_folder), Path(out))
    Path(out, f"seen-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))

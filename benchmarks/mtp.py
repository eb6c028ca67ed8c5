"""`smollm2-135m-mtp`: SmolLM2-135M with a layer of multi-token prediction that is trained here.

The checkpoint is in MiMo's form: a Llama with biases of queries, keys and values, all of them 0. The
layer begins as a copy of the model's last layer and is trained on samples of the model.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.models.spec.mtp import MIMO

TOPICS = (
    """
the moon, bread, the heart, money, a long train ride, bees, the French Revolution, sleep, electric cars, gardens, rain
the number zero, chess, old maps, coffee, a broken window, volcanoes, good manners, the internet, whales, a small town
music, glass, the Roman army, allergies, winter, a job interview, rivers
""".strip()
    .replace("\n", ", ")
    .split(", ")
)
REQUESTS = (
    *("Explain {} to a child.", "Write a short story about {}.", "List five facts about {}."),
    *("What should a beginner know about {}?", "Write an email to a friend about {}."),
    *("Give three arguments for and against {}.", "How would you describe {} in a poem?"),
    *("What is the history of {}?", "Write a dialogue between two people about {}."),
)
CODE = (
    *(
        "def sort_{}(items):\n    ",
        "class {}:\n    def __init__(self",
        "import {}\n\ndef main():\n",
    ),
    *('<div class="{}">\n', "# {}\n\n## Installation\n\n", "SELECT * FROM {} WHERE "),
)
NAMES = ("numbers", "users", "names", "orders", "files", "points", "words", "events", "books")
LEARNED = 3072  # tokens over which the loss compares distributions
RATE = 1e-3  # first learning rate; the last is a twentieth of it


def prompts() -> list[str]:
    """Return chats and beginnings of code, in a random but fixed order."""
    asked = [request.format(topic) for request in REQUESTS for topic in TOPICS]
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
    texts = chats + [begin.format(name) for begin in CODE for name in NAMES]
    random.Random(1).shuffle(texts)
    return texts


def trained_model(folder: Path, source: Path) -> Path:
    """Return the folder of the model, trained at its first use (50 minutes on two cores)."""
    if (folder / "model.safetensors").exists():
        return folder
    untrained = folder.with_name(f"{folder.name}-untrained")
    if not (untrained / "config.json").exists():
        _write_untrained(untrained, source)
    _train(untrained, folder)
    return folder


def _write_untrained(folder: Path, source: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.bfloat16() for name, tensor in read_tensors(source)}
    config = json.loads((source / "config.json").read_text())
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    heads["v"] = heads["k"]
    for layer in range(last + 1):
        for which, count in heads.items():
            name = f"model.layers.{layer}.self_attn.{which}_proj.bias"
            tensors[name] = torch.zeros(count * size, dtype=torch.bfloat16)
    copied = f"model.layers.{last}."
    for name in [name for name in tensors if name.startswith(copied)]:
        tensors[f"{MIMO.layer}.{name.removeprefix(copied)}"] = tensors[name].clone()
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors |= {MIMO.embed_norm: ones, MIMO.hidden_norm: ones.clone()}
    tensors[MIMO.norm] = tensors["model.norm.weight"].clone()
    unit = torch.eye(hidden, dtype=torch.bfloat16)
    tensors[MIMO.project] = torch.cat([unit, unit], dim=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, folder)
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "head_dim": size,
        "attention_bias": True,
        "use_sliding_window": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _train(untrained: Path, folder: Path, rounds: int = 22, per_round: int = 16) -> None:
    """Train on samples of the model, new ones in each round."""
    from nano_inference.rl.draft_training import frequent_tokens
    from nano_inference.rl.mtp_training import MtpTrainer

    config = EngineConfig(
        str(untrained), dtype="bfloat16", draft_model="mtp", max_model_len=512, max_batch_size=64
    )
    held_out, texts = prompts()[:16], prompts()[16:]
    with InferenceEngine(config) as engine:
        params = SamplingParams(max_tokens=192, temperature=1.0)
        measured = engine.generate(held_out, params, progress=False)
        first = engine.generate(texts[:per_round], params, 4, progress=False)
        frequent = frequent_tokens([*measured, *first], LEARNED, engine.spec.vocab_size)
        trainer = MtpTrainer(engine, places=2, learned_tokens=frequent, learning_rate=RATE)
        began, drawn = time.monotonic(), random.Random(2)
        for round_ in range(rounds):
            samples = engine.generate(drawn.sample(texts, per_round), params, 4, progress=False)
            loss = trainer.train(samples, epochs=4, batch_size=1)
            engine.update_draft(trainer.weights())
            shares = ", ".join(f"{share:.3f}" for share in trainer.agreement(measured))
            passed = time.monotonic() - began
            print(f"round {round_}: loss {loss:.3f}, {shares}, {passed:.0f} s", file=sys.stderr)
            for group in trainer.optimizer.param_groups:
                group["lr"] = RATE * (0.05 + 0.95 * (1 - (round_ + 1) / rounds))
        trainer.save(folder)

"""The client `tinker` and recipes of `tinker-cookbook`, unmodified, against a service of
SmolLM2-135M. They run in a separate environment (`make test-tinker` creates it).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nano_inference import EngineConfig
from nano_inference.checkpoints.loading import resolve_model
from nano_training_service.config import TrainServiceConfig
from nano_training_service.main import running_service

HERE = Path(__file__).parent
PYTHON = Path(sys.prefix) / "tinker" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"there is no {PYTHON}; make test-tinker makes it"
    ),
]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the base model and yield its URL. The base model's name is its folder, which has the tokenizer."""
    state = tmp_path_factory.mktemp("state")
    config = TrainServiceConfig(port=0, state_dir=str(state), max_models=8)
    with running_service(EngineConfig(MODEL, max_model_len=512, num_threads=1), config) as url:
        yield url


@pytest.fixture(scope="module")
def folder() -> str:
    return str(resolve_model(MODEL))


def run(*arguments: str, cwd: Path, url: str) -> str:
    quiet = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TINKER_API_KEY": "tml-test",
        "TINKER_BASE_URL": url,
        "HF_HOME": str(cwd / "hub"),
    }
    command = [str(PYTHON), "-W", "ignore", *arguments]
    ran = subprocess.run(command, cwd=cwd, env=quiet, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def test_client(url: str, folder: str, tmp_path: Path) -> None:
    output = run(str(HERE / "with_tinker.py"), url, folder, cwd=tmp_path, url=url)
    report = json.loads(output.splitlines()[-1])
    assert report["losses"] == sorted(report["losses"], reverse=True)
    for row in report["sampled"]["rows"]:
        assert row["sampler"] == row["trainer"] == row["computed"]
        assert row["prompt"] == row["trainer_prompt"]
    assert report["sampled"]["again"] == [row["tokens"] for row in report["sampled"]["rows"]]
    assert set(report["sampled"]["top"][1:]) == {3}
    # every ratio is exactly 1, so these are minus the sum of advantages: 8 tokens of each sign
    assert report["policy"]["importance_sampling"] == report["policy"]["ppo"] == 0.0
    assert report["policy"]["gspo"] == 0.0
    assert report["columns"]["sparse"]
    assert [shape[1:] for shape in report["columns"]["shapes"]] == [[3], []]
    assert report["columns"]["last"] == report["columns"]["single"]
    assert "no such route" in report["unpublished"]
    assert report["custom"]["mine"] == 1.0
    assert report["rest"][0] == report["rest"][1]
    assert report["rank"] == 8
    assert report["paths"] == [True]
    assert report["downloaded"] == ["adapter_config.json", "adapter_model.safetensors"]
    stable, other, rank = report["refused"]
    assert "user: " in stable
    assert "got 'stable_reinforce'" in stable
    assert "got 'another/model'" in other
    assert "max_rank" in rank


def recipe(name: str, folder: str, tmp_path: Path, url: str, **options: Any) -> list[Any]:
    """Run a recipe and return the metrics of its steps."""
    fields = {
        "model_name": folder,
        "renderer_name": "qwen3_instruct",
        "log_path": tmp_path / "log",
        **options,
    }
    words = [f"{option}={value}" for option, value in fields.items() if value is not None]
    run("-m", f"tinker_cookbook.recipes.{name}", *words, cwd=tmp_path, url=url)
    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_supervised_recipe(url: str, folder: str, tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} + 1?"},
                {"role": "assistant", "content": f"{number + 1}."},
            ]
        }
        for number in range(8)
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    steps = recipe(
        "chat_sl.train",
        folder,
        tmp_path,
        url,
        dataset=data,
        batch_size=2,
        max_length=64,
        max_steps=3,
        learning_rate=1e-3,
        lora_rank=4,
        eval_every=0,
        save_every=0,
    )
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_reinforcement_learning_on_arithmetic(url: str, folder: str, tmp_path: Path) -> None:
    steps = recipe(
        "math_rl.train",
        folder,
        tmp_path,
        url,
        env="arithmetic",
        group_size=4,
        groups_per_batch=3,
        max_tokens=5,
        max_steps=2,
        learning_rate=1e-3,
        lora_rank=4,
        eval_every=0,
    )
    assert len(steps) == 2
    assert any(step["grad_norm"] > 0 for step in steps)
    for step in steps:  # sampler and trainer agree bit for bit
        assert step["optim/kl_sample_train_v1"] == 0.0
        assert step["optim/kl_sample_train_v2"] == 0.0


def test_preferences_by_reinforcement_learning(url: str, folder: str, tmp_path: Path) -> None:
    steps = recipe(
        "preference.shorter.train",
        folder,
        tmp_path,
        url,
        batch_size=1,
        group_size=3,
        max_tokens=8,
        max_steps=1,
        eval_every=0,
    )
    assert [step["optim/kl_sample_train_v1"] for step in steps] == [0.0]


KNOWN = "Qwen/Qwen3-8B-Base"  # the cookbook maps this name to the renderer role_colon


@pytest.fixture
def known(tmp_path: Path, folder: str) -> Iterator[str]:
    """Yield the URL of a service whose base model has a name that the cookbook knows. The recipe's
    folder has the tokenizer under that name.
    """
    (tmp_path / KNOWN).parent.mkdir()
    (tmp_path / KNOWN).symlink_to(folder)
    config = TrainServiceConfig(
        port=0, state_dir=str(tmp_path / "state"), served_model_name=KNOWN, max_models=2
    )
    with running_service(EngineConfig(MODEL, max_model_len=512, num_threads=1), config) as url:
        yield url


def data_set(folder: Path, name: str, rows: list[dict[str, Any]], config: str = "default") -> None:
    """Write a folder that replaces the hub's data set of that name."""
    (folder / name).mkdir(parents=True)
    (folder / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files: train.jsonl\n---\n"
    )


def weights_of(state: Path) -> dict[str, Any]:
    """Return the adapter of the run's last checkpoint."""
    (found,) = state.glob("runs/*/weights/final/adapter_model.safetensors")
    return load_file(found)


def test_reinforcement_learning_loop(known: str, tmp_path: Path) -> None:
    """Run the unmodified `rl_loop` as the docs do. The model often repeats the answer of the
    prompt's example, 3, so that rewards in a group differ.
    """
    rows = [
        {"question": f"How many {letter}'s are in strawberry?", "answer": "So it is 3.\n#### 3"}
        for letter in "abcd"
    ]
    data_set(tmp_path, "openai/gsm8k", rows, "main")
    steps = recipe(
        "rl_loop",
        KNOWN,
        tmp_path,
        known,
        renderer_name=None,
        batch_size=2,
        group_size=12,
        max_tokens=90,
        max_steps=2,
        learning_rate=1e-4,
        lora_rank=4,
        save_every=0,
    )
    assert len(steps) == 2
    assert 0 < steps[0]["reward/total"] < 1, steps
    assert steps[0]["grad_norm"] > 0
    # B starts as zeros, so training changed it
    moved = [
        each.abs().max() for name, each in weights_of(tmp_path / "state").items() if "_B" in name
    ]
    assert min(moved) > 0


def test_supervised_loop(known: str, tmp_path: Path) -> None:
    """Run the unmodified `sl_loop` as the docs do."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} + 1?"},
                {"role": "assistant", "content": f"{number + 1}."},
            ]
        }
        for number in range(8)
    ]
    data_set(tmp_path, "HuggingFaceH4/no_robots", chats)
    steps = recipe(
        "sl_loop",
        KNOWN,
        tmp_path,
        known,
        renderer_name=None,
        batch_size=2,
        max_length=64,
        max_steps=3,
        learning_rate=1e-3,
        lora_rank=4,
        save_every=0,
    )
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert weights_of(tmp_path / "state")


def test_direct_preference_optimization(url: str, folder: str, tmp_path: Path) -> None:
    """Read the data from a folder with the name of the hub's data set."""
    data = tmp_path / "Anthropic" / "hh-rlhf"
    data.mkdir(parents=True)
    for name in ("train", "test"):
        lines = [
            json.dumps(
                {
                    "chosen": f"\n\nHuman: What is {number} + 1?\n\nAssistant: {number + 1}.",
                    "rejected": f"\n\nHuman: What is {number} + 1?\n\nAssistant: No.",
                }
            )
            for number in range(4)
        ]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    steps = recipe(
        "preference.dpo.train",
        folder,
        tmp_path,
        url,
        batch_size=2,
        max_length=64,
        max_steps=2,
        learning_rate=1e-4,
    )
    losses = [step["dpo_loss"] for step in steps]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(0.6931472, abs=1e-6)  # policy and reference are equal
    assert losses[1] != losses[0]

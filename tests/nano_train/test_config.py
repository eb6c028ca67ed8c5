"""run.toml: every wrong value is reported by its key, before any work."""

from pathlib import Path
from typing import Any

import pytest

from nano_inference.errors import ConfigError
from nano_train.config import FREE, RunConfig, parse_changes, read_config
from nano_train.local_code import load_function
from nano_train.methods import METHODS
from nano_train.questions import Question, RewardError, Task, load_task
from nano_train.run import read_run
from tests.nano_train.tiny import tiny_run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser.learning_rate": 1.0}, "optimiser is not a key; did you mean optimizer?"),
        ({"optimizer.learning_rte": 1.0}, r"learning_rte is not a key; did you mean optimizer\.l"),
        ({"optimizer.learning_rate": -1.0}, r"optimizer\.learning_rate=-1\.0 is not valid"),
        ({"optimizer.learning_rate": "fast"}, r"optimizer\.learning_rate='fast' is not valid"),
        ({"optimizer.beta1": 1.0}, r"optimizer\.beta1=1\.0 is not valid"),
        ({"optimizer.epsilon": float("nan")}, r"optimizer\.epsilon=nan is not valid"),
        ({"steps": 0}, "steps=0 is not valid"),
        ({"steps": 2.5}, "steps=2.5 is not valid"),
        ({"steps": True}, "steps=True is not valid"),
        (
            {"recompute_activations": 1},
            "recompute_activations=1 is not valid: it should be a valid",
        ),
        ({"seed": -1}, "seed=-1 is not valid"),
        ({"method": "grop"}, "method: 'grop' is unknown; did you mean 'grpo'?"),
        ({"sampling.temperature": 0.0}, r"sampling\.temperature=0\.0 is not valid"),
        ({"task.samples": 1}, r"task\.samples=1 gives every sample the advantage 0"),
        ({"loss.kl": 0.1}, "needs the logprobs of a reference"),
        ({"loss.ratio": "tokens"}, r"loss\.ratio='tokens' is not valid"),
        ({"engine.block_sise": 4}, "engine: 'block_sise' is unknown; did you mean 'block_size'?"),
        ({"engine.block_size": -4}, "block_size=-4"),
        ({"engine.model_path": "x"}, "engine.model_path is set by 'model'"),
        ({"teacher.model": "x"}, "teacher has no effect with method='grpo'"),
        ({"method": "sft"}, "task.samples must be 1 with method='sft'"),
        ({"method": "distill"}, "task.reward has no effect with method='distill'"),
        ({"name": "../x"}, r"name='\.\./x' is not valid"),
        ({"task.train": "missing.py:train"}, r"missing\.py does not exist"),
        ({"task.train": "low_ids.py:nothing"}, "low_ids.py has no function 'nothing'"),
        ({"task.train": "low_ids.py"}, "must be FILE.py:FUNCTION"),
        ({"task.reward": "no.such.module:f"}, r"no\.such\.module cannot be imported"),
        ({"task.train": "../low_ids.py:train"}, "put it next to run.toml"),
    ],
)
def test_wrong_value_is_reported_by_its_key(
    file: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run(file, file.parent / "out", changes)
    assert not (file.parent / "out").exists()


def test_missing_key_is_reported(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("reward")]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"task\.reward is missing; name a function"):
        read_config(file)


def test_file_that_is_not_toml_is_reported(file: Path) -> None:
    file.write_text("steps = \n")
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read as TOML"):
        read_config(file)


def test_changes_are_toml_values_or_text() -> None:
    pairs = [
        "optimizer.learning_rate=1e-4",
        'sampling.stop=["a", "b"]',
        "method=rloo",
        "log.x=true",
    ]
    assert parse_changes(pairs) == {
        "optimizer.learning_rate": 1e-4,
        "sampling.stop": ["a", "b"],
        "method": "rloo",
        "log.x": True,
    }
    with pytest.raises(ConfigError, match="must be KEY=VALUE"):
        parse_changes(["steps"])


def test_identity_leaves_out_free_keys_only(file: Path) -> None:
    config = read_config(file)
    values = {
        "steps": 99,
        "checkpoint_every": 9,
        "keep_checkpoints": 9,
        "recompute_activations": True,
        "engine.block_size": 8,
        "log.hashes": False,
    }
    assert {key.partition(".")[0] for key in values} == set(FREE)
    assert read_config(file, values).identity({}) == config.identity({})
    for key, value in (("seed", 3), ("updates", 2), ("loss.clip_low", 0.3), ("model", "x")):
        assert read_config(file, {key: value}).identity({}) != config.identity({})
    assert config.identity({"a.py": ""}) != config.identity({})


def test_loss_table_changes_the_row_of_the_method(file: Path) -> None:
    config = read_config(file, {"method": "dapo", "loss.clip_high": 0.5})
    assert config.row.clip_high == 0.5
    assert config.row.advantage == METHODS["dapo"].advantage
    assert read_config(file, {"method": "dapo"}).row == METHODS["dapo"]


def test_questions_come_from_json_lines(file: Path) -> None:
    lines = (
        '{"prompt": [5, 6], "answer": "x"}\n\n{"messages": [{"role": "user", "content": "a"}]}\n'
    )
    (file.parent / "questions.jsonl").write_text(lines)
    task = load_task(read_config(file, {"task.train": "questions.jsonl"}), file.parent)
    chat = [{"role": "user", "content": "a"}]
    assert list(task.train) == [Question([5, 6], "x"), Question(chat, None)]
    (file.parent / "questions.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(ConfigError, match=r"questions\.jsonl, line 1 must be a dict with prompt"):
        load_task(read_config(file, {"task.train": "questions.jsonl"}), file.parent)


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf")])
def test_reward_must_be_a_finite_number(value: Any) -> None:
    task = Task([Question("a")], reward=lambda *_: value)
    with pytest.raises(RewardError, match="the reward of step 1, sample 2 is"):
        task.score(Any, None, "step 1, sample 2")  # pyright: ignore


def test_failing_reward_is_reported_with_its_sample() -> None:
    def broken(*_: Any) -> float:
        raise KeyError("n")

    with pytest.raises(RewardError, match=r"the reward of sample 7 failed: KeyError: 'n'\."):
        Task([Question("a")], reward=broken).score(Any, None, "sample 7")  # pyright: ignore


def test_changed_file_is_imported_anew(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("def f(): return 1\n")
    assert load_function("code.py:f", tmp_path)() == 1
    code.write_text("def f(): return 2\n")
    assert load_function("code.py:f", tmp_path)() == 2


def test_examples_are_valid_runs() -> None:
    examples = Path(__file__).parents[2] / "examples"
    for file in sorted(examples.rglob("*.toml")):
        assert isinstance(read_config(file), RunConfig), file

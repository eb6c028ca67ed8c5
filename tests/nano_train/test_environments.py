"""Runs whose questions, conversations and rewards belong to an environment of verifiers.

Without verifiers, a stand-in of the same interface takes its place (`standin/verifiers`).
"""

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import InferenceEngine
from nano_inference.data import read_jsonl
from nano_inference.errors import ConfigError
from nano_inference.rl import replay
from nano_train.config import TaskTable
from nano_train.edit import edit
from nano_train.environments import RolloutFailed
from nano_train.run import read_run, train
from tests.cli.running import write_tokenizer
from tests.models.tiny import tiny_llama
from tests.nano_train.test_run import Interrupted, stop_after
from tests.nano_train.tiny import files_of

HERE = Path(__file__).parent
TEMPLATE = (
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson "
    "}}</tool_call>{% endfor %}{{ '</s>' if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RUN = """\
model = "{model}"
steps = 3
test_every = 2
checkpoint_every = 1
method = "grpo"

[task]
prompts = 2
samples = 3
environment = {{ id = "nano-letters", held_out = 1, args.taskset = {{ turns = {turns} }} }}

[sampling]
max_tokens = 8

[optimizer]
learning_rate = 2e-3

[engine]
device = "cpu"
num_threads = 1
max_model_len = 512
kv_cache_memory = 8_388_608
"""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """Install the tests' environment, and verifiers' stand-in where it is missing."""
    folders = [str(HERE / "installed")]
    if importlib.util.find_spec("verifiers") is None:
        folders.append(str(HERE / "standin"))
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        yield
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("verifiers", "nano_letters")
    ]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with a token per byte, and many tokens that are a whole call of a tool."""
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "model", max_position=1024)
    write_tokenizer(folder, TEMPLATE)
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text("utf-8"))
    for token in range(259, 300):
        call = json.dumps({"name": "add", "arguments": {"a": token, "b": 1}})
        added = {"id": token, "content": f"<tool_call> {call}</tool_call>", "special": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        words["added_tokens"].append(added | flags)
        words["model"]["vocab"][added["content"]] = token
    file.write_text(json.dumps(words), encoding="utf-8")
    return folder


def run_file(folder: Path, model: Path, turns: int) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "run.toml"
    file.write_text(RUN.format(model=model, turns=turns), encoding="utf-8")
    return file


@pytest.fixture(scope="module", params=[1, 3], ids=["one turn", "tools"])
def quiet(request: pytest.FixtureRequest, model: Path, tmp_path_factory: Any) -> Path:
    """Return a run.toml whose run in `out` is complete."""
    file = run_file(tmp_path_factory.mktemp("quiet"), model, request.param)
    train(read_run(file, file.parent / "out"))
    return file


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text("utf-8").splitlines()]


def failing(folder: Path, model: Path, fault: str, **changes: Any) -> str:
    """Return the error of a run whose third task has a fault."""
    file = run_file(folder, model, 2)
    changes = {"task.environment.args.taskset.fault": fault, "task.samples": 2} | changes
    with pytest.raises(RolloutFailed) as caught:
        train(read_run(file, folder / "out", changes))
    return str(caught.value)


@pytest.mark.thorough(cases=["one turn"])
def test_run_trains_on_an_environment(quiet: Path) -> None:
    steps = steps_of(quiet.parent / "out")
    assert [step["mismatch"] for step in steps] == [0.0] * 3
    assert any(step["reward"] for step in steps)
    assert [step["held_out"] is not None for step in steps] == [True, False, True]
    assert all(update["gradient_norm"] is None for step in steps for update in step["updates"])
    assert len({update["parameters"] for step in steps for update in step["updates"]}) == 3


@pytest.mark.thorough(cases=["one turn"])
def test_rollout_is_one_sample_that_replays(quiet: Path, model: Path) -> None:
    config = read_run(quiet, quiet.parent / "out").config
    with InferenceEngine(config.engine_config()) as engine:
        samples = list(read_jsonl(quiet.parent / "out/samples/0.jsonl"))
        texts = [engine.tokenizer.decode(sample.completion_tokens) for sample in samples]
        for sample in samples:
            again = replay(engine, sample)
            assert again.completion_tokens == sample.completion_tokens
            assert again.logprobs == sample.logprobs
            assert sample.weight_versions[-1].end == len(sample.completion_tokens)
    assert config.task.environment is not None
    turns = config.task.environment.args["taskset"]["turns"]
    assert len(samples) == len({sample.seed for sample in samples}) == 6
    for sample, text in zip(samples, texts, strict=True):
        assert text.count("assistant: ") == turns - 1
        assert sum(sample.loss_mask) <= 8 * turns
        assert all(sample.loss_mask) is (turns == 1)
    assert any("tool: " in text for text in texts) is (turns > 1)


@pytest.mark.thorough(cases=["one turn"])
def test_interrupted_rollouts_resume_to_same_files(quiet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (0, 1):
        with pytest.raises(Interrupted):
            train(read_run(quiet, out), stop_after(step))
    train(read_run(quiet, out))
    assert files_of(out) == files_of(quiet.parent / "out")


@pytest.mark.thorough(cases=["one turn"])
def test_concurrent_rollouts_change_no_bits(quiet: Path, tmp_path: Path) -> None:
    alone = {"task.environment.concurrency": 1, "task.environment.timeout": 500.0}
    train(read_run(quiet, tmp_path / "out", alone))
    assert files_of(tmp_path / "out") == files_of(quiet.parent / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adapter", "reference", "stop strings"])
def test_rollouts_of_other_runs_are_exact(kind: str, model: Path, tmp_path: Path) -> None:
    changes = {
        "adapter": {"lora.rank": 2, "optimizer.learning_rate": 0.1},
        "reference": {"reference": str(model), "loss.kl": 0.1, "method": "gspo"},
        "stop strings": {"sampling.stop": ["a", "e", "o"]},
    }[kind]
    out = tmp_path / "out"
    train(read_run(run_file(tmp_path, model, 2), out, {"steps": 2} | changes))
    steps = steps_of(out)
    assert [step["mismatch"] for step in steps] == [0.0] * 2
    samples = list(read_jsonl(out / "samples/1.jsonl"))
    assert {sample.weight_version for sample in samples} == {1 if kind != "adapter" else 0}
    assert (steps[1]["kl"] is not None) is (kind == "reference")
    if kind == "adapter":
        assert {sample.adapter_versions[0].version for sample in samples} == {2}
    if kind == "stop strings":
        assert any(sample.stop_reason in ("a", "e", "o") for sample in samples)


@pytest.mark.thorough(cases=["one turn"])
def test_changed_environment_is_another_run(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = quiet.parent / "other.py"
    other.write_text("# another text")
    monkeypatch.setattr(sys.modules["nano_letters"], "__file__", str(other))
    with pytest.raises(ConfigError, match=r"another run: code\.environment\.json"):
        train(read_run(quiet, quiet.parent / "out"))


@pytest.mark.thorough
def test_completions_of_rollouts_are_not_edited(quiet: Path, tmp_path: Path) -> None:
    run = read_run(quiet, quiet.parent / "out")
    with pytest.raises(ConfigError, match="of an environment cannot be edited"):
        edit(run, 1, tmp_path / "edited", completions={0: [5]})
    child = edit(run, 1, tmp_path / "edited", rewards={0: 1.0})
    train(child)
    before, after = steps_of(quiet.parent / "out"), steps_of(tmp_path / "edited")
    assert before[0] == after[0]
    assert before[1]["samples"] == after[1]["samples"]
    assert before[1]["rewards"] != after[1]["rewards"]


@pytest.mark.thorough(but=["raise"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raise", "this rubric is broken"),
        ("nan", "the reward is nan; return a finite number"),
        ("top_k", "top_k changes the distribution"),
        ("rewrite", "the environment changes earlier messages"),
        ("forget", "the chat does not continue the last turn"),
    ],
    ids=["raise", "nan", "top_k", "rewrite", "forget"],
)
def test_faulty_rollout_is_named(fault: str, text: str, model: Path, tmp_path: Path) -> None:
    # question 1 is the third task, of which the first is held out
    problem = failing(tmp_path, model, fault)
    assert problem.startswith("step 0, question 1, sample ")
    assert text in problem


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "text"), [("hang", "took longer than"), ("block", "blocks its event loop")]
)
def test_hanging_rollout_is_named(fault: str, text: str, model: Path, tmp_path: Path) -> None:
    try:
        problem = failing(tmp_path, model, fault, **{"task.environment.timeout": 2.0})
    finally:
        if fault == "block":
            sys.modules["nano_letters"].RELEASED.set()
    assert problem.startswith("step 0, question 1, sample ")
    assert text in problem


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"task.environment.id": "no-such-module"}, "cannot be imported: ModuleNotFoundError"),
        ({"task.environment.held_out": 8}, "has 8 tasks, of which task.environment.held_out=8"),
        ({"task.environment.args.taskset.colour": 1}, "cannot be loaded"),
        ({"task.environment.timeout": 0.0}, "task.environment.timeout"),
        ({"task.train": "task.py:train"}, "task.train has no effect with task.environment"),
        ({"method": "sft", "task.samples": 1}, "task.environment has no effect with method='sft'"),
    ],
)
def test_wrong_environment_is_reported(
    changes: dict[str, Any], text: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(run_file(tmp_path, model, 1), tmp_path / "out", changes)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_documented_environment_is_valid() -> None:
    page = (HERE.parents[1] / "docs" / "runs.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    table = TaskTable.model_validate(tomllib.loads(block)["task"])
    assert table.environment is not None
    assert table.environment.args == {"agent": {"max_turns": 4}}


@pytest.mark.parametrize("release", [None, "0.3.1"])
def test_missing_verifiers_names_the_extra(
    release: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if release is None:
        monkeypatch.setitem(sys.modules, "verifiers", None)
    else:
        monkeypatch.setattr(sys.modules["verifiers"], "__version__", release)
    with pytest.raises(ConfigError, match=r"pip install 'nano-inference\[environments\]'"):
        read_run(run_file(tmp_path, model, 1), tmp_path / "out")

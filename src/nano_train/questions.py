"""Questions, answers and rewards of a run."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nano_inference import Grammar, TrainingSample
from nano_inference.errors import ConfigError, NanoInferenceError, one_line
from nano_train.config import RunConfig
from nano_train.environments import Environment, code_of_environment, load_environment
from nano_train.local_code import is_file, load_function, local_file


class RewardError(NanoInferenceError):
    """Reward function that failed, or returned something else than a finite number."""


class Question(NamedTuple):
    """A prompt (text, token ids or messages), and its answer for the reward function. Or a task of
    an environment.
    """

    prompt: Any
    answer: Any = None


@dataclass(frozen=True)
class Task:
    """Questions and rewards.

    Attributes:
        train: Questions in the order of training. After the last one, the first follows again.
        held_out: Questions that only measure. Empty: none.
        reward: Function of a sample and its answer. None for methods without rewards.
        grammar: Grammar of the answers, if any.
        environment: Environment that plays and rewards the questions, which are its tasks. None:
            the model answers them once.
    """

    train: Sequence[Question]
    held_out: Sequence[Question] = ()
    reward: Callable[[TrainingSample, Any], float] | None = None
    grammar: Grammar | None = None
    environment: Environment | None = None

    def score(self, sample: TrainingSample, answer: Any, where: str) -> float:
        """Return a sample's reward. Raises `RewardError`, which names the sample by `where`."""
        assert self.reward is not None
        try:
            reward = self.reward(sample, answer)
        except Exception as problem:
            raise RewardError(f"the reward of {where} failed: {one_line(problem)}.") from problem
        if isinstance(reward, int | float) and math.isfinite(reward):
            return float(reward)
        raise RewardError(f"the reward of {where} is {reward!r}; return a finite number.")


def load_task(config: RunConfig, folder: Path) -> Task:
    """Return the task of a run whose files are in `folder`. Raises `ConfigError`."""
    table = config.task
    if table.environment is not None:
        environment = load_environment(table.environment, config.steps * table.prompts)
        tasks = [Question(task) for task in environment.tasks]
        first = table.environment.held_out
        return Task(tasks[first:], tasks[:first], environment=environment)
    assert table.train is not None  # RunConfig requires it
    train = _questions(table.train, folder, config.seed)
    if not train:
        raise ConfigError(f"task.train={table.train!r} has no questions; provide at least one.")
    if config.row.kind == "sft":
        for number, question in enumerate(train):
            if not isinstance(question.answer, str | list) or not question.answer:
                raise ConfigError(
                    f"task.train={table.train!r}: the answer of question {number} must be text or "
                    "token ids with method='sft'."
                )
    grammar = None
    if table.grammar is not None:
        grammar = load_function(table.grammar, folder)()
        if not isinstance(grammar, Grammar):
            raise ConfigError(
                f"task.grammar={table.grammar!r} returned a {type(grammar).__name__}; return a "
                "Grammar."
            )
    return Task(
        train,
        _questions(table.held_out, folder, config.seed) if table.held_out else (),
        load_function(table.reward, folder) if table.reward else None,
        grammar,
    )


def code_of(config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the texts of the files that a configuration names, by name. Raises `ConfigError`."""
    table = config.task
    named = (table.train, table.held_out, table.reward, table.grammar)
    files = {spec.partition(":")[0]: spec for spec in named if spec is not None and is_file(spec)}
    try:
        texts = {name: local_file(spec, folder).read_text("utf-8") for name, spec in files.items()}
    except (OSError, UnicodeError) as problem:
        raise ConfigError(f"a file that run.toml names cannot be read: {problem}.") from problem
    if table.environment is not None:
        texts["environment.json"] = code_of_environment(table.environment)
    return texts


def _questions(spec: str, folder: Path, seed: int) -> list[Question]:
    if spec.endswith(".jsonl"):
        lines = local_file(spec, folder).read_text("utf-8").splitlines()
        rows = [(f"{spec}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
        return [_question(_row(line, where), where) for where, line in rows]
    try:
        made = list(load_function(spec, folder)(seed))
    except ConfigError:
        raise
    except Exception as problem:
        raise ConfigError(f"{spec} failed: {one_line(problem)}.") from problem
    return [_question(row, f"{spec}, question {number}") for number, row in enumerate(made)]


def _row(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as problem:
        raise ConfigError(f"{where} is not JSON: {problem}.") from problem


def _question(row: Any, where: str) -> Question:
    """Return a question from a dict, or from a pair of prompt and answer."""
    if isinstance(row, dict) and row.keys() <= {"prompt", "messages", "answer"}:
        prompt = row.get("prompt", row.get("messages"))
        question = Question(prompt, row.get("answer"))
    elif isinstance(row, tuple) and len(row) == 2:
        question = Question(*row)
    else:
        raise ConfigError(f"{where} must be a dict with prompt (or messages) and answer.")
    if not isinstance(question.prompt, str | list) or not question.prompt:
        raise ConfigError(f"{where}: the prompt must be text, token ids or messages.")
    return question

"""`run.toml`: the configuration of a run, checked as a whole before any work."""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    ValidationError,
    model_validator,
)

from nano_inference import EngineConfig, LoraSettings
from nano_inference.config import with_plain_weights
from nano_inference.errors import ConfigError
from nano_train.methods import METHODS, Advantage, Aggregation, Method, Ratio

# Parts that decide no bit of a checkpoint, so that a resumed run may change them. The engine's
# numerics are compared on their own.
FREE = (
    *("steps", "checkpoint_every", "keep_checkpoints", "recompute_activations"),
    *("engine", "log"),
)
# fields of the engine's configuration that other keys of run.toml set
_SET_ELSEWHERE = {
    "model_path": "model",
    "ref_model_path": "reference",
    "max_loras": "lora.rank",
    "max_lora_rank": "lora.rank",
}

Texts = Annotated[tuple[str, ...], Strict(False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class EnvironmentTable(_Table):
    """`[task.environment]`: an environment of verifiers, which has questions and rewards.

    Attributes:
        id: Id of the installed environment.
        args: Other keys of verifiers' `[env]` block, such as `taskset` and `agent`.
        held_out: Number of its first tasks that only measure.
        timeout: Maximum seconds of a rollout.
        concurrency: Maximum number of rollouts that play at once. It changes no bits.
    """

    id: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] = Field(default_factory=dict[str, Any])
    held_out: NonNegativeInt = 0
    timeout: PositiveFloat = 600.0
    concurrency: PositiveInt = 16


class TaskTable(_Table):
    """`[task]`: questions and rewards.

    Attributes:
        train, held_out: Questions: `file.py:function` or `module:function` of the seed, or a
            `.jsonl` file. A file is relative to run.toml.
        reward: Function of a sample and its answer, likewise.
        grammar: Function without arguments that returns the `Grammar` of the answers.
        environment: Environment in place of the four.
        prompts: Number of questions in each step.
        samples: Number of samples of each question: a group.
    """

    train: str | None = None
    held_out: str | None = None
    reward: str | None = None
    grammar: str | None = None
    environment: EnvironmentTable | None = None
    prompts: PositiveInt = 4
    samples: PositiveInt = 8


class SamplingTable(_Table):
    """`[sampling]`: `SamplingParams` of the samples. Seeds follow from run, step and question."""

    max_tokens: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    stop: Texts = ()


class OptimizerTable(_Table):
    """`[optimizer]`: AdamW.

    Attributes:
        warmup_steps: Steps in which the learning rate rises from 0.
        max_grad_norm: Gradients of a larger norm are scaled down to it. 0: never.
    """

    learning_rate: PositiveFloat = 1e-5
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    max_grad_norm: NonNegativeFloat = 0.0


class LossTable(_Table):
    """`[loss]`: changes of the method's row, and the factor of KL(policy || reference)."""

    advantage: Advantage | None = None
    ratio: Ratio | None = None
    aggregation: Aggregation | None = None
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    clip_high: NonNegativeFloat | None = None
    kl: NonNegativeFloat = 0.0


class LoraTable(_Table):
    """`[lora]`: train an adapter in place of all weights. Rank 0: all weights."""

    rank: Annotated[int, Field(ge=0, le=256)] = 0
    alpha: PositiveFloat | None = None  # None: 2 * rank


class TeacherTable(_Table):
    """`[teacher]`: model and direction of the divergence, as in `PolicyModel.kl`."""

    model: str
    direction: Literal["reverse", "forward"] = "reverse"


class LogTable(_Table):
    """`[log]`: loggers in addition to steps.jsonl, and hashes.

    Attributes:
        tensorboard: Write events of TensorBoard into the run's folder.
        wandb: Project of Weights & Biases. None: do not log there.
        hashes: Write the hash of every gradient and parameter in each step, for `runs bisect`.
    """

    tensorboard: bool = False
    wandb: str | None = None
    hashes: bool = True


class RunConfig(_Table):
    """A run: everything that its last checkpoint depends on, apart from code and machine.

    Attributes:
        model: Model as in `EngineConfig.model_path`.
        method: Row of `METHODS`.
        steps: Number of steps. A finished run continues if you raise it.
        seed: Seed of questions and samples.
        updates: Updates of the weights in each step, each with all samples.
        test_every: Steps between two measurements of the held-out questions.
        checkpoint_every: Steps between two checkpoints.
        keep_checkpoints: Newest checkpoints to keep. 0: all.
        reference: Model whose logprobs are recorded, for KL.
        require_equal_logprobs: End the run if a logprob of trainer and engine differs.
        recompute_activations: As in `PolicyModel`. Decides memory and time, and no bit.
        engine: Other fields of `EngineConfig`.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")] = "run"
    model: Annotated[str, Field(min_length=1)]
    method: str = "grpo"
    steps: PositiveInt = 100
    seed: Annotated[int, Field(ge=0, lt=2**30)] = 0
    updates: PositiveInt = 1
    test_every: PositiveInt = 10
    checkpoint_every: PositiveInt = 25
    keep_checkpoints: NonNegativeInt = 2
    reference: str | None = None
    require_equal_logprobs: bool = True
    recompute_activations: bool | None = None
    task: TaskTable
    sampling: SamplingTable = SamplingTable()
    optimizer: OptimizerTable = OptimizerTable()
    loss: LossTable = LossTable()
    lora: LoraTable = LoraTable()
    teacher: TeacherTable | None = None
    log: LogTable = LogTable()
    engine: dict[str, Any] = Field(default_factory=dict[str, Any])

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_one_of("method", self.method, METHODS)
        kind = METHODS[self.method].kind
        unused = {
            "task.environment": kind != "rl" and self.task.environment is not None,
            "task.reward": (kind == "distill" or (kind == "sft" and not self._tests))
            and self.task.reward is not None,
            "loss": kind != "rl" and self.loss != LossTable(),
            "reference": kind != "rl" and self.reference is not None,
            "sampling": kind == "sft" and not self._tests and self.sampling != SamplingTable(),
            "task.held_out": kind == "distill" and self.task.held_out is not None,
            "task.grammar": kind != "rl" and self.task.grammar is not None,
            "teacher": kind != "distill" and self.teacher is not None,
        }
        for key, is_unused in unused.items():
            if is_unused:
                raise ValueError(f"{key} has no effect with method={self.method!r}; remove it.")
        self._check_needs(kind)
        if self.engine.keys() & _SET_ELSEWHERE.keys():
            name = min(self.engine.keys() & _SET_ELSEWHERE.keys())
            raise ValueError(f"engine.{name} is set by {_SET_ELSEWHERE[name]!r}; remove it.")
        for name in self.engine:
            known = {field.name for field in fields(EngineConfig)} - _SET_ELSEWHERE.keys()
            _require_one_of("engine", name, known)
        _ = self.engine_config()
        return self

    @property
    def _tests(self) -> bool:
        return self.task.held_out is not None

    def _check_task(self) -> None:
        if self.task.environment is None:
            if self.task.train is None:
                raise ValueError("task.train is missing; name a function such as 'task.py:train'.")
            return
        for name in ("train", "held_out", "reward", "grammar"):
            if getattr(self.task, name) is not None:
                raise ValueError(f"task.{name} has no effect with task.environment; remove it.")

    def _check_needs(self, kind: str) -> None:
        self._check_task()
        needs_reward = (kind == "rl" or self._tests) and self.task.environment is None
        if needs_reward and self.task.reward is None:
            raise ValueError("task.reward is missing; name a function such as 'task.py:reward'.")
        if kind == "rl" and self.task.samples < 2:
            raise ValueError("task.samples=1 gives every sample the advantage 0; use 2 or more.")
        if kind == "sft" and self.task.samples != 1:
            raise ValueError("task.samples must be 1 with method='sft': one answer per question.")
        if kind == "distill" and self.teacher is None:
            raise ValueError("teacher.model is missing; name the model that grades samples.")
        if kind == "distill" and self.lora.rank:
            raise ValueError("lora.rank must be 0 with method='distill', which trains all weights.")
        if self.loss.kl and self.reference is None:
            raise ValueError("loss.kl needs the logprobs of a reference; set reference.")
        if self.reference is not None and self.task.grammar is not None:
            raise ValueError(
                "a reference ignores grammars, so KL would be wrong; remove reference or grammar."
            )

    @property
    def row(self) -> Method:
        """Row of the method, with the changes of `[loss]`."""
        row = METHODS[self.method]
        changed = {name: value for name, value in self.loss if value is not None and name != "kl"}
        return Method(**{field.name: getattr(row, field.name) for field in fields(row)} | changed)

    def engine_config(self) -> EngineConfig:
        """Return the engine's configuration. Raises `ConfigError`."""
        loras = {"max_loras": 1, "max_lora_rank": self.lora.rank} if self.lora.rank else {}
        config = EngineConfig(self.model, ref_model_path=self.reference, **loras, **self.engine)
        return with_plain_weights(config)

    def lora_settings(self) -> LoraSettings | None:
        """Return the adapter's settings, or None if all weights are trained."""
        rank = self.lora.rank
        return LoraSettings(rank=rank, alpha=self.lora.alpha or 2.0 * rank) if rank else None

    def identity(self, code: Mapping[str, str]) -> str:
        """Return the SHA-256 of all that decides the run's bits, with the texts of its files."""
        decisive = self.model_dump(mode="json", exclude={*FREE, "name"})
        environment = decisive["task"].pop("environment")
        if environment is not None:
            kept = {name: environment[name] for name in ("id", "args", "held_out")}
            decisive["task"]["environment"] = kept
        text = json.dumps([decisive, dict(code)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _require_one_of(key: str, value: str, known: Any) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}."
        raise ValueError(f"{key}: {value!r} is unknown; {hint}")


def read_config(path: Path, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Read run.toml.

    Args:
        path: The file.
        changes: Values by dotted key, such as `{"optimizer.learning_rate": 1e-4}`, which replace
            those of the file.

    Raises:
        ConfigError: The file cannot be read, or a key or value is invalid. The message names it.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise ConfigError(f"{path} does not exist; name the file of a run.") from problem
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigError(f"{path} cannot be read as TOML: {problem}.") from problem
    for key, value in (changes or {}).items():
        _change(content, key, value)
    try:
        return RunConfig.model_validate(content)
    except ValidationError as problem:
        raise ConfigError(f"{path}: {_sentence(problem)}") from None


def parse_changes(pairs: list[str]) -> dict[str, Any]:
    """Return the values of `KEY=VALUE` pairs. VALUE is TOML, or else text. Raises `ConfigError`."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"{pair!r} must be KEY=VALUE, such as optimizer.learning_rate=1e-4.")
        try:
            changes[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key.strip()] = text
    return changes


def _change(content: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    table = content
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key}: {part!r} is not a table of run.toml; check the key.")
    table[last] = value


def _sentence(problem: ValidationError) -> str:
    """Return the first problem as a sentence with its key."""
    first = problem.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        return str(first.get("ctx", {}).get("error"))
    if first["type"] == "missing":
        return f"{key} is missing."
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _keys(RunConfig), n=1)
        return f"{key} is not a key; " + (
            f"did you mean {near[0]}?" if near else "remove it, or see docs/runs.md."
        )
    text = first["msg"].removeprefix("Input ")
    return f"{key}={first['input']!r} is not valid: it {text}."


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += _keys(kind, f"{prefix}{name}.")
    return keys

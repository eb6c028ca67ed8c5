"""A training run step by step: collect samples, update the weights.

This is the loop to read and to copy. It knows no files: `run.py` keeps a folder around it. At every
token, trainer and engine compute the same logprob bit for bit, which each step checks. On CPUs all
bits follow from configuration and task (`numerics` names the exceptions): processors, batch sizes,
caches, threads and interruptions change none of them.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nano_inference import InferenceEngine, SamplingParams, TrainingSample
from nano_inference.rl import LoraPolicy, PolicyModel, exact_sum
from nano_train import hashes
from nano_train.config import RunConfig
from nano_train.environments import Arena, Play
from nano_train.losses import advantages, mean, reward_loss, sampled
from nano_train.optimizer import (
    clip_gradients,
    load_state,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from nano_train.questions import Question, Task
from nano_train.records import (
    Batch,
    Edits,
    LogprobMismatch,
    RunError,
    State,
    Step,
    Update,
    record_of,
)
from nano_train.samples import answered, rewritten


class Trainer:
    """Engine, policy and optimizer of a run.

    Args:
        config: Configuration.
        task: Questions and rewards.
        start: State to begin from. None: the initial model.
        edits: Changes of one step.

    Raises the errors of `InferenceEngine`, `PolicyModel` and `LoraPolicy`.
    """

    def __init__(
        self, config: RunConfig, task: Task, start: State | None = None, edits: Edits | None = None
    ) -> None:
        self.config, self.task, self.edits = config, task, edits or Edits()
        self.method = config.row
        self.step = self.version = 0
        with ExitStack() as opened:
            self.engine = opened.enter_context(InferenceEngine(config.engine_config()))
            settings, recomputes = config.lora_settings(), config.recompute_activations
            self.policy = (
                LoraPolicy(self.engine, settings, recompute_activations=recomputes)
                if settings
                else PolicyModel(self.engine, recompute_activations=recomputes)
            )
            self.teacher = None
            if config.teacher is not None:
                graded = replace(config.engine_config(), model_path=config.teacher.model)
                self.teacher = PolicyModel(opened.enter_context(InferenceEngine(graded)))
            self.optimizer = make_optimizer(self.policy.parameters(), config.optimizer)
            if start is not None:
                self._load(start)
            if isinstance(self.policy, LoraPolicy) or self.version:
                self._publish()
            self._engines = opened.pop_all()

    @property
    def numerics(self) -> str:
        """Numerics that decide bits: the engine's, and torch's if it computes gradients."""
        engine = self.engine.numerics.fingerprint
        if self.policy.gradients == "kernels" and self.teacher is None:
            return engine
        return f"{engine} torch-{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"

    def _load(self, start: State) -> None:
        if start.numerics != self.numerics:
            raise RunError(
                f"the state of step {start.step} has the numerics {start.numerics!r}, this machine "
                f"and configuration have {self.numerics!r}; resume it as it began."
            )
        self.step, self.version = start.step, start.version
        with torch.no_grad():
            for name, param in self.policy.named_parameters():
                param.copy_(start.parameters[name])
        load_state(self.optimizer, start.optimizer)

    def steps(self) -> Iterator[Step]:
        """Do the remaining steps."""
        while self.step < self.config.steps:
            began = time.perf_counter()
            held_out = self.held_out()
            batch = self.collect()
            version = self.version
            updates = list(self.updates(batch))
            seconds = time.perf_counter() - began
            yield Step(record_of(batch, updates, version, held_out, seconds), batch, updates)

    def collect(self) -> Batch:
        """Return the data of the next step. Raises `RewardError` and `RolloutFailed`."""
        table, step = self.config.task, self.step
        numbers = [*range(step * table.prompts, (step + 1) * table.prompts)]
        asked = [self.task.train[number % len(self.task.train)] for number in numbers]
        if self.method.kind == "sft":
            return Batch(step, numbers, [answered(self.engine, *q, self.version) for q in asked])
        edits = self.edits if self.edits.step == step else Edits()
        seed = (self.config.seed if edits.seed is None else edits.seed) << 32
        owners = [number for number in numbers for _ in range(table.samples)]
        if self.task.environment is not None:
            samples, rewards = self._played(asked, owners, seed)
        else:
            params = [self._params(seed=seed + number) for number in numbers]
            prompts, rewards = [question.prompt for question in asked], list[float]()
            samples = self.engine.generate(prompts, params, table.samples, progress=False)
        samples = [
            replace(sample, request_id=number, group_id=number, cached_tokens=0)
            for sample, number in zip(samples, owners, strict=True)
        ]
        for index, tokens in edits.completions.items():
            temperature, grammar = self.config.sampling.temperature, self.task.grammar
            samples[index] = rewritten(self.policy, samples[index], tokens, temperature, grammar)
        if self.method.kind == "distill":
            return Batch(step, numbers, samples)
        rewards = rewards or [
            self.task.score(
                sample, asked[index // table.samples].answer, f"step {step}, sample {index}"
            )
            for index, sample in enumerate(samples)
        ]
        for index, reward in edits.rewards.items():
            rewards[index] = reward
        return Batch(
            *(step, numbers, samples, rewards), advantages(rewards, table.samples, self.method)
        )

    @cached_property
    def arena(self) -> Arena:
        """The task's environment, opened when it is needed first."""
        environment, stop = self.task.environment, self.config.sampling.stop
        assert environment is not None
        return self._engines.enter_context(closing(environment.opened(self.engine, stop)))

    def _played(
        self, asked: Sequence[Question], owners: Sequence[int], seed: int
    ) -> tuple[list[TrainingSample], list[float]]:
        """Return the samples and rewards of rollouts, each with a seed of its own."""
        count, plays = self.config.task.samples, list[Play]()
        for index, number in enumerate(owners):
            params = self._params(seed=seed + number * count + index % count)
            where = f"step {self.step}, question {number}, sample {index}"
            plays.append(Play(asked[index // count].prompt, params, where))
        played = self.arena.play(plays)
        return [one.sample for one in played], [one.reward for one in played]

    def updates(self, batch: Batch) -> Iterator[Update]:
        """Update the weights with the data of the next step, and publish them.

        Without any advantage the weights stay as they are. Raises `LogprobMismatch`.
        """
        set_learning_rate(self.optimizer, self.config.optimizer, batch.step)
        for number in range(self.config.updates):
            loss, logprobs, mismatch = self._loss(batch, compared=number == 0)
            update = Update(float(loss.detach()), hashes.hashes_of_values(logprobs), mismatch)
            if self.method.kind == "rl" and not any(batch.advantages) and not self.config.loss.kl:
                yield update
                break
            yield self._step(update, loss)
        self.step += 1

    def _loss(
        self, batch: Batch, *, compared: bool
    ) -> tuple[Tensor, Sequence[Tensor], float | None]:
        """Return the loss, the logprobs (or divergences) that it consists of, and the mismatch."""
        samples, config = batch.samples, self.config
        sequences = [sample.prompt_tokens + sample.completion_tokens for sample in samples]
        starts = [len(sample.prompt_tokens) for sample in samples]
        tokens = sum(len(sample.completion_tokens) for sample in samples)
        temperature = config.sampling.temperature
        if self.teacher is not None and config.teacher is not None:
            assert isinstance(self.policy, PolicyModel)
            values = self.policy.kl(
                *(sequences, self.teacher),
                direction=config.teacher.direction,
                from_position=starts,
                temperature=temperature,
            )
            return exact_sum(torch.cat(values)) / tokens, values, None
        values = self.policy.logprobs(
            sequences,
            from_position=starts,
            temperature=temperature if self.method.kind == "rl" else 1.0,
            grammar=self.task.grammar,
        )
        if self.method.kind == "sft":
            return -exact_sum(torch.cat(values)) / tokens, values, None
        mismatch = self._mismatch(batch, values) if compared else None
        loss = reward_loss(
            *(self.method, samples, values, batch.advantages),
            *(config.sampling.max_tokens, config.loss.kl),
        )
        return loss, values, mismatch

    def _mismatch(self, batch: Batch, values: Sequence[Tensor]) -> float:
        difference = hashes.first_difference(batch.samples, values)
        if difference is not None and self.config.require_equal_logprobs:
            raise LogprobMismatch(
                f"step {batch.step}, {difference}; trainer and engine have different weights or "
                "numerics. Set require_equal_logprobs=false to train nevertheless."
            )
        return max(
            float(sampled(sample, value.detach() - torch.tensor(sample.logprobs)).abs().max())
            for value, sample in zip(values, batch.samples, strict=True)
        )

    def _step(self, update: Update, loss: Tensor) -> Update:
        """Apply the gradients of a loss and publish the weights."""
        logged, most = self.config.log.hashes, self.config.optimizer.max_grad_norm
        loss.backward()
        named = dict(self.policy.named_parameters())
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        before = hashes.hashes_of_tensors(gradients) if logged else {}
        norm = clip_gradients(self.policy.parameters(), most) if most else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self._publish()
        after = hashes.hashes_of_tensors(named) if logged else {}
        return replace(update, gradient_norm=norm, gradients=before, parameters=after)

    def _publish(self) -> None:
        if isinstance(self.policy, LoraPolicy):
            self.policy.publish(version=self.version + 1)  # an adapter begins with version 1
        else:
            self.policy.publish(version=self.version)

    def held_out(self) -> float | None:
        """Return the mean reward of greedy answers to the held-out questions, if it is due."""
        task, step, config = self.task, self.step, self.config
        due = step % config.test_every == 0 or step == config.steps - 1
        if not task.held_out or not due:
            return None
        prompts = [question.prompt for question in task.held_out]
        params = self._params(temperature=0.0)
        if task.environment is not None:
            name = f"step {step}, held-out question"
            plays = [Play(one, params, f"{name} {index}") for index, one in enumerate(prompts)]
            return mean([played.reward for played in self.arena.play(plays)])
        samples = self.engine.generate(prompts, params, progress=False)
        return mean(
            [
                task.score(sample, question.answer, f"held-out question {index}")
                for index, (sample, question) in enumerate(zip(samples, task.held_out, strict=True))
            ]
        )

    def state(self) -> State:
        """Return the state between two steps. Its tensors are those of the run, not copies."""
        parameters = {name: param.detach() for name, param in self.policy.named_parameters()}
        tensors = parameters, state_tensors(self.optimizer)
        return State(self.step, self.version, self.numerics, *tensors)

    def sha256(self) -> str:
        """Return the SHA-256 of all parameters' names and bytes, in name order."""
        return hashes.sha256_of_tensors(dict(self.policy.named_parameters()))

    def _params(self, **values: Any) -> SamplingParams:
        table = self.config.sampling
        adapter = self.policy.name if isinstance(self.policy, LoraPolicy) else None
        fixed = {"max_tokens": table.max_tokens, "stop": table.stop, "adapter": adapter}
        merged = {**fixed, "temperature": table.temperature, "grammar": self.task.grammar, **values}
        return SamplingParams(**merged)

    def close(self) -> None:
        """Shut the engines down."""
        self._engines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

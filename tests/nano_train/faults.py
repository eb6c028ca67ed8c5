"""Faults planted into a step of a run, and how deep they are found.

`python -m tests.nano_train.faults` runs every fault and prints a table: the step, part and depth that
`compare_runs` and `repeat` report, and the seconds that each takes.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nano_inference.rl import policy as policies
from nano_train import trainer as trainers
from nano_train.bisect import Finding, compare_runs, repeat
from nano_train.losses import by_group
from nano_train.records import Batch, LogprobMismatch, Update
from nano_train.run import Run, read_run, train
from nano_train.trainer import Trainer
from tests.nano_train.tiny import tiny_run

STEP = 1  # the step with the fault
STEPS = 3
MATRIX = "model.layers.1.mlp.up_proj.weight"
FIRST = "model.layers.0.self_attn.q_proj.weight"


class Hooks:
    """Points of a step at which a fault acts. A fault overrides some of them."""

    def before(self, trainer: Trainer) -> None:
        """Act before the questions are chosen."""

    def collected(self, trainer: Trainer, batch: Batch) -> Batch:
        """Change the data of the step."""
        return batch

    def wrapped(self, trainer: Trainer) -> Any:
        """Return a context in which the updates run."""
        return nullcontext()

    def stepping(self, trainer: Trainer) -> None:
        """Act between gradients and the optimizer's step."""

    def stepped(self, trainer: Trainer) -> None:
        """Act after the optimizer's step, before weights are published."""

    def after(self, trainer: Trainer) -> None:
        """Act after the step."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        kind: Origin: data, reward, sampling, kernel, loss, gradient, optimizer, race, file.
        hooks: The fault.
        part: Part in which the difference begins.
        depth: Fields of `Finding` that name the place, in addition to the step.
        late: Steps between the fault and its first effect.
        stops: The run itself stops, because trainer and engine differ.
        exact: Values of these fields, if the fault has a known place.
    """

    name: str
    kind: str
    hooks: Callable[[], Hooks]
    part: str
    depth: tuple[str, ...] = ()
    late: int = 0
    stops: bool = False
    exact: Mapping[str, int] = field(default_factory=dict[str, int])


def _hooks(**functions: Any) -> Callable[[], Hooks]:
    return lambda: type("Planted", (Hooks,), functions)()


# -- data ------------------------------------------------------------------------------------------


def _shift_questions(_: Any, trainer: Trainer) -> None:
    train = trainer.task.train
    trainer.task = replace(trainer.task, train=[*train[1:], train[0]])


def _change_prompt(_: Any, trainer: Trainer) -> None:
    train = list(trainer.task.train)
    number = STEP * trainer.config.task.prompts + 2
    train[number] = train[number]._replace(prompt=[*train[number].prompt[:-1], 99])
    trainer.task = replace(trainer.task, train=train)


def _swap_samples(_: Any, trainer: Trainer, batch: Batch) -> Batch:
    samples = list(batch.samples)
    samples[4], samples[5] = samples[5], samples[4]
    return replace(batch, samples=samples)


def _repeat_sample(_: Any, trainer: Trainer, batch: Batch) -> Batch:
    samples = list(batch.samples)
    samples[6] = samples[7]
    return replace(batch, samples=samples)


def _skip_question(_: Any, trainer: Trainer, batch: Batch) -> Batch:
    return replace(batch, questions=[number + 1 for number in batch.questions])


# -- rewards ---------------------------------------------------------------------------------------


def _reward_of(index: int, change: Callable[[float], float]) -> Any:
    def collected(_: Any, trainer: Trainer, batch: Batch) -> Batch:
        rewards = list(batch.rewards)
        rewards[index] = change(rewards[index])
        size = trainer.config.task.samples
        return replace(
            batch, rewards=rewards, advantages=trainers.advantages(rewards, size, trainer.method)
        )

    return collected


def _advantages_by(compute: Callable[[list[float]], list[float]]) -> Any:
    def collected(_: Any, trainer: Trainer, batch: Batch) -> Batch:
        return replace(batch, advantages=compute(batch.rewards))

    return collected


def _one_group(rewards: list[float]) -> list[float]:
    return by_group(rewards)


def _unbiased(rewards: list[float]) -> list[float]:
    return [
        value * (3 / 4) ** 0.5 for s in range(0, 12, 4) for value in by_group(rewards[s : s + 4])
    ]


# -- sampling --------------------------------------------------------------------------------------


def _sampling(**changes: Any) -> Any:
    def before(_: Any, trainer: Trainer) -> None:
        params = trainer._params

        def changed(**values: Any) -> Any:
            made = params(**values)
            shifted = {k: v(getattr(made, k)) for k, v in changes.items()}
            return replace(made, **shifted)

        trainer._params = changed  # pyright: ignore

    return before


def _flip_logprob(_: Any, trainer: Trainer, batch: Batch) -> Batch:
    samples = list(batch.samples)
    values = torch.tensor(samples[3].logprobs)
    values[2] = torch.nextafter(values[2], torch.tensor(0.0))
    samples[3] = replace(samples[3], logprobs=tuple(values.tolist()))
    return replace(batch, samples=samples)


def _flip_token(_: Any, trainer: Trainer, batch: Batch) -> Batch:
    samples = list(batch.samples)
    tokens = list(samples[2].completion_tokens)
    tokens[1] = (tokens[1] + 1) % 300
    samples[2] = replace(samples[2], completion_tokens=tuple(tokens))
    return replace(batch, samples=samples)


# -- weights ---------------------------------------------------------------------------------------


def _param(trainer: Trainer, name: str) -> Any:
    return dict(trainer.policy.named_parameters())[name]


def _write(name: str, factor: float) -> Any:
    def act(_: Any, trainer: Trainer) -> None:
        with torch.no_grad():
            _param(trainer, name).data[0, :4] *= factor

    return act


def _lose_update(_: Any, trainer: Trainer) -> None:
    trainer._publish = lambda: None  # pyright: ignore


def _publish_partly(_: Any, trainer: Trainer) -> None:
    def publish() -> None:
        named = dict(trainer.policy.named_parameters())
        del named[MATRIX]
        trainer.engine.update_weights(named, blocking=True, version=trainer.version)

    trainer._publish = publish  # pyright: ignore


def _write_both(_: Any, trainer: Trainer) -> None:
    _write(FIRST, 1.5)(_, trainer)
    trainer.version += 1
    trainer._publish()


# -- loss and gradients ----------------------------------------------------------------------------


@contextmanager
def _with_method(trainer: Trainer, **changes: Any) -> Iterator[None]:
    before = trainer.method
    trainer.method = replace(before, **changes)
    try:
        yield
    finally:
        trainer.method = before


def _method(**changes: Any) -> Any:
    return lambda _, trainer: _with_method(trainer, **changes)


def _drop_last_token(_: Any, trainer: Trainer) -> Any:
    loss = trainers.reward_loss

    def shorter(method: Any, samples: Any, values: Any, *rest: Any) -> Any:
        cut = [replace(s, logprobs=s.logprobs[:-1]) for s in samples]
        return loss(method, cut, [v[:-1] for v in values], *rest)

    return mock.patch.object(trainers, "reward_loss", shorter)


def _gradient(name: str, change: Callable[[Any], None]) -> Any:
    @contextmanager
    def hooked(trainer: Trainer) -> Iterator[None]:
        def act(param: Any) -> None:
            change(param.grad)

        handle = _param(trainer, name).register_post_accumulate_grad_hook(act)
        try:
            yield
        finally:
            handle.remove()

    return lambda _, trainer: hooked(trainer)


def _flip_bit(gradient: torch.Tensor) -> None:
    gradient.view(torch.int32).view(-1)[7] ^= 1


def _scale(param: Any) -> None:
    param.grad.mul_(1.001)


def _from_layer(_: Any, trainer: Trainer) -> Any:
    """Change the gradients of layer 0 and of the embedding, as a fault in its backward does."""

    @contextmanager
    def hooked() -> Iterator[None]:
        named = dict(trainer.policy.named_parameters())
        handles = [
            param.register_post_accumulate_grad_hook(_scale)
            for name, param in named.items()
            if ".layers.0." in name or "embed" in name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return hooked()


def _count_twice(_: Any, trainer: Trainer) -> Any:
    micro_batches = policies.micro_batches

    def doubled(*arguments: Any) -> Any:
        listed = list(micro_batches(*arguments))
        return [*listed, listed[-1]]

    return mock.patch.object(policies, "micro_batches", doubled)


def _share_buffer(_: Any, trainer: Trainer) -> Any:
    gradients_of = trainer.policy._gradients

    def overwritten(*arguments: Any) -> Any:
        gradients = gradients_of(*arguments)
        total = gradients["model.layers.1.mlp.down_proj.weight"]
        total[0] = total[1]
        return gradients

    return mock.patch.object(trainer.policy, "_gradients", overwritten)


def _narrow_products(_: Any, trainer: Trainer) -> Any:
    assert isinstance(trainer.policy, policies.PolicyModel)
    return mock.patch.object(trainer.policy, "micro_batch_tokens", 17)


def _keep_gradients(_: Any, trainer: Trainer) -> Any:
    return mock.patch.object(trainer.optimizer, "zero_grad", return_value=None)


# -- optimizer -------------------------------------------------------------------------------------


def _group(**changes: Any) -> Any:
    def stepping(_: Any, trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0].update(changes)

    return stepping


def _decay_one(_: Any, trainer: Trainer) -> None:
    with torch.no_grad():
        _param(trainer, MATRIX).mul_(1 - 1e-4)


def _reset_moment(_: Any, trainer: Trainer) -> None:
    trainer.optimizer.state[_param(trainer, MATRIX)]["exp_avg"].zero_()


def _skip_one(_: Any, trainer: Trainer) -> None:
    _param(trainer, MATRIX).grad = None


def _step_twice(_: Any, trainer: Trainer) -> None:
    trainer.optimizer.step.__wrapped__()  # pyright: ignore


def _round(_: Any, trainer: Trainer) -> None:
    with torch.no_grad():
        param = _param(trainer, "model.norm.weight")
        param.copy_(param.bfloat16().float())


_SAMPLE, _TOKEN = ("sample",), ("sample", "token")
_UPDATE, _LAYER, _NAMES = ("update",), ("update", "layer", "names"), ("update", "names")
FAULTS = (
    Fault("questions are shifted", "data", _hooks(before=_shift_questions), "samples", _SAMPLE),
    Fault("a prompt has another token", "data", _hooks(before=_change_prompt), "samples", _SAMPLE, exact={"sample": 8}),
    Fault("a question is skipped", "data", _hooks(collected=_skip_question), "questions"),
    Fault("two samples are swapped", "data", _hooks(collected=_swap_samples), "samples", _TOKEN, exact={"sample": 4}),
    Fault("a sample comes twice", "data", _hooks(collected=_repeat_sample), "samples", _TOKEN, exact={"sample": 6}),
    Fault(
        *("a reward is off by one bit", "reward"),
        *(_hooks(collected=_reward_of(5, lambda r: r + 2.0**-52)), "rewards", _SAMPLE),
    ),
    Fault("a reward is 0", "reward", _hooks(collected=_reward_of(9, lambda _: 0.0)), "rewards", _SAMPLE, exact={"sample": 9}),
    Fault("a reward has the other sign", "reward", _hooks(collected=_reward_of(2, lambda r: -r)), "rewards", _SAMPLE, exact={"sample": 2}),
    Fault("groups are mixed", "reward", _hooks(collected=_advantages_by(_one_group)), "advantages", _SAMPLE),
    Fault("deviation divides by n - 1", "reward", _hooks(collected=_advantages_by(_unbiased)), "advantages", _SAMPLE),
    Fault("seeds are off by one", "sampling", _hooks(before=_sampling(seed=lambda s: s + 1)), "samples", _TOKEN),
    Fault("the temperature is 0.999", "sampling", _hooks(before=_sampling(temperature=lambda _: 0.999)), "samples", _TOKEN, stops=True),
    Fault("samples end a token early", "sampling", _hooks(before=_sampling(max_tokens=lambda n: n - 1)), "samples", _TOKEN, exact={"token": 5}),
    Fault("a logprob is off by one bit", "kernel", _hooks(collected=_flip_logprob), "samples", _TOKEN, stops=True),
    Fault("a token is flipped", "kernel", _hooks(collected=_flip_token), "samples", _TOKEN, stops=True),
    Fault("an update is lost", "race", _hooks(before=_lose_update), "logprobs", _TOKEN, 1, stops=True),
    Fault("an update lacks a matrix", "race", _hooks(before=_publish_partly), "logprobs", _TOKEN, 1, stops=True),
    Fault("a thread writes a weight before the step", "race", _hooks(stepping=_write(FIRST, 1.01)), "parameters", _LAYER, exact={"layer": 0}),
    Fault("memory changes between two steps", "race", _hooks(after=_write_both), "samples", _TOKEN, 1),
    Fault("a micro-batch is counted twice", "race", _hooks(wrapped=_count_twice), "gradients", _LAYER),
    Fault("two workers share a row", "race", _hooks(wrapped=_share_buffer), "gradients", _LAYER, exact={"layer": 1}),
    Fault("micro-batches are smaller", "gradient", _hooks(wrapped=_narrow_products), "gradients", _LAYER),
    Fault("the last token is left out", "loss", _hooks(wrapped=_drop_last_token), "gradients", _LAYER),
    Fault("the loss is a sum of tokens", "loss", _hooks(wrapped=_method(aggregation="sum")), "loss", _UPDATE),
    Fault("the ratio is clipped early", "loss", _hooks(wrapped=_method(clip_low=1e-4, clip_high=1e-4)), "loss", _UPDATE),
    Fault("a gradient is 0", "gradient", _hooks(wrapped=_gradient(MATRIX, lambda g: g.zero_())), "gradients", _LAYER, exact={"layer": 1}),
    Fault("a bit of a gradient is flipped", "gradient", _hooks(wrapped=_gradient(FIRST, _flip_bit)), "gradients", _LAYER, exact={"layer": 0}),
    Fault("backward of layer 0 is off", "gradient", _hooks(wrapped=_from_layer), "gradients", _LAYER, exact={"layer": 0}),
    Fault("gradients are not cleared", "gradient", _hooks(wrapped=_keep_gradients), "gradients", _LAYER, exact={"layer": -1}),
    Fault("the learning rate is 1 % higher", "optimizer", _hooks(stepping=_group(lr=2.02e-3)), "parameters", _NAMES),
    Fault("beta2 is 0.99", "optimizer", _hooks(stepping=_group(betas=(0.9, 0.99))), "parameters", _NAMES),
    Fault("a matrix decays", "optimizer", _hooks(stepping=_decay_one), "parameters", _LAYER, exact={"layer": 1}),
    Fault("a moment is lost", "optimizer", _hooks(stepping=_reset_moment), "parameters", _LAYER, exact={"layer": 1}),
    Fault("a matrix is skipped", "optimizer", _hooks(stepping=_skip_one), "parameters", _LAYER, exact={"layer": 1}),
    Fault("a step is done twice", "optimizer", _hooks(stepped=_step_twice), "parameters", _NAMES),
    Fault("a norm is rounded", "optimizer", _hooks(stepped=_round), "parameters", _LAYER, exact={"layer": -1}),
)  # fmt: skip


def faulty(fault: Fault) -> type[Trainer]:
    """Return a trainer with the fault in step `STEP`."""
    hooks = fault.hooks()

    class Faulty(Trainer):
        def collect(self) -> Batch:
            if self.step != STEP:
                return super().collect()
            task = self.task
            hooks.before(self)
            batch = super().collect()
            self.task = task
            self.__dict__.pop("_params", None)
            return hooks.collected(self, batch)

        def updates(self, batch: Batch) -> Iterator[Update]:
            if batch.step != STEP:
                yield from super().updates(batch)
                return
            step = self.optimizer.step

            def stepping() -> None:
                hooks.stepping(self)
                step()
                hooks.stepped(self)

            stepping.__wrapped__ = step  # pyright: ignore
            with mock.patch.object(self.optimizer, "step", stepping), hooks.wrapped(self):
                yield from super().updates(batch)
            self.__dict__.pop("_publish", None)
            hooks.after(self)

    return Faulty


def run_with(fault: Fault | None, file: Path, out: Path) -> str | None:
    """Run with a fault, or without. Return the message of the error that stops the run, if any."""
    run = read_run(file, out)
    try:
        with mock.patch("nano_train.run.Trainer", Trainer if fault is None else faulty(fault)):
            train(run)
    except LogprobMismatch as problem:
        return str(problem)
    return None


def fault_run(folder: Path) -> Path:
    """Write the run into which faults are planted."""
    more = 'updates = 2\nseed = 3\nname = "faults"\n[loss]\naggregation = "token"\n'
    return tiny_run(folder, steps=STEPS, more=more)


def check(fault: Fault, finding: Finding | None) -> str | None:
    """Return the reason why a finding is not the planted fault, or None."""
    if finding is None:
        return "not found"
    if finding.step != STEP + fault.late or finding.part != fault.part:
        return f"found elsewhere: {finding}"
    if any(getattr(finding, name) != value for name, value in fault.exact.items()):
        return f"found elsewhere: {finding}"
    missing = [name for name in fault.depth if getattr(finding, name) in (None, ())]
    return f"{', '.join(missing)} unknown: {finding}" if missing else None


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = fault_run(folder / "task")
        run_with(None, file, folder / "clean")
        clean = read_run(folder / "clean")
        rows: list[dict[str, Any]] = []
        chosen = [fault for fault in FAULTS if not sys.argv[1:] or fault.name in sys.argv[1:]]
        for number, fault in enumerate(chosen):
            rows.append(_measured(fault, file, folder / str(number), clean))
            print(json.dumps(rows[-1]), flush=True)
    seen = sum(row["by comparison"] == "exact" or row["stopped"] is not None for row in rows)
    print(f"{seen} of {len(rows)} faults found by the run itself or by comparison")
    print(f"{sum(row['by repetition'] == 'exact' for row in rows)} found by repetition")


def _measured(fault: Fault, file: Path, out: Path, clean: Run) -> dict[str, Any]:
    stopped = run_with(fault, file, out)
    row: dict[str, Any] = {"fault": fault.name, "kind": fault.kind, "stopped": stopped}
    run = read_run(out)
    ways: dict[str, Callable[[], Finding | None]] = {
        "by comparison": lambda: compare_runs(clean, run),
        "by repetition": lambda: repeat(run),
    }
    for way, find in ways.items():
        began = time.perf_counter()
        try:
            finding = find() if run.folder.steps() else None
            row[way] = check(fault, finding) or "exact"
            row[f"{way}: text"] = str(finding)
        except Exception as problem:
            row[way] = f"{type(problem).__name__}: {problem}"
        row[f"{way}: seconds"] = round(time.perf_counter() - began, 2)
    return row


if __name__ == "__main__":
    main()

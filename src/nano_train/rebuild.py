"""The state of any step of a run, from the nearest checkpoint before it and the logged samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nano_inference.errors import ConfigError
from nano_inference.rl import PolicyModel
from nano_train.records import RunError
from nano_train.run import Run, hashed
from nano_train.trainer import Trainer


@contextmanager
def rebuilt(run: Run, step: int) -> Iterator[Trainer]:
    """Yield a trainer in the state after `step` steps, from which step `step` samples.

    Updates are computed again from the logged samples, and their hashes are compared with the
    logged ones.

    Raises:
        ConfigError: The run has not come that far.
        RunError: A checkpoint or log is damaged, or an update has other bits than the run logged.
    """
    require_step(run, step)
    nearest = run.checkpoints.last_before(step)
    if nearest is None and run.parent is not None:
        raise RunError(f"{run.folder.path} has no checkpoint of step {run.first}; edit it again.")
    start = None if nearest is None else run.checkpoints.read(nearest)
    with Trainer(run.config, run.task, start, run.edits) as trainer:
        del start  # its tensors are copied
        for number in range(trainer.step, step):
            redo(run, trainer, number)
        yield trainer


def redo(run: Run, trainer: Trainer, step: int) -> None:
    """Repeat the updates of a step. Raises `RunError` if their bits differ from the logged ones."""
    batch, logged = run.folder.read_batch(step)
    again = list(trainer.updates(batch))
    if [hashed(update) for update in again] != [hashed(update) for update in logged]:
        raise RunError(
            f"step {step} of {run.folder.path} has other bits when it is repeated; "
            f"`nano-inference runs bisect {run.folder.path}` finds the first difference."
        )


def require_step(run: Run, step: int) -> None:
    """Raise `ConfigError` unless the run has done this many steps."""
    done = len(run.folder.steps())
    if not 0 <= step <= done:
        raise ConfigError(f"step {step} is not in {run.folder.path}, which has 0 to {done}.")


def open_step(run: Run, step: int, out: Path) -> str:
    """Write the model (or the adapter) of a step into a new folder, and return the SHA-256 of its
    parameters. Raises the errors of `rebuilt`, and `ConfigError` if the folder holds a model.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose a new folder.")
    with rebuilt(run, step) as trainer:
        if isinstance(trainer.policy, PolicyModel):
            trainer.policy.save_pretrained(out, masters=True)
        else:
            trainer.policy.save_pretrained(out)
        return trainer.sha256()

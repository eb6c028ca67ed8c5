"""Where a run's figures go, in addition to steps.jsonl: one small interface."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from nano_inference.errors import ConfigError
from nano_train.config import RunConfig


class Logger(Protocol):
    """Receiver of figures."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Receive the figures of a step."""
        ...

    def close(self) -> None:
        """Write everything that is left."""
        ...


class TensorBoard:
    """Events of TensorBoard in the run's folder. Events from `first` on are replaced."""

    def __init__(self, folder: Path, config: RunConfig, identity: str, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the file of events."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. A resumed run continues under the same id."""

    def __init__(self, folder: Path, config: RunConfig, identity: str, first: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(
            project=config.log.wandb,
            name=config.name,
            id=identity[:16],
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


# package and class by the key in `[log]`
LOGGERS: dict[str, tuple[str, type[TensorBoard] | type[Wandb]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
}


def require_loggers(config: RunConfig) -> None:
    """Raise `ConfigError` if the package of a chosen logger is missing."""
    for key, (package, _) in LOGGERS.items():
        if getattr(config.log, key) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.{key} requires {package}, not installed here; run: "
                f"pip install 'nano-inference[{key}]'"
            )


def open_loggers(folder: Path, config: RunConfig, identity: str, first: int) -> list[Logger]:
    """Return the loggers that a configuration chooses, for steps from `first` on."""
    return [
        logger(folder, config, identity, first)
        for key, (_, logger) in LOGGERS.items()
        if getattr(config.log, key)
    ]

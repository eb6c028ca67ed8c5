"""Saving of parameters as a Hugging Face checkpoint."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nano_inference.checkpoints.gguf.file import described_by
from nano_inference.checkpoints.loading import load_spec, read_tensors, resolve_model
from nano_inference.errors import ConfigError
from nano_inference.models.parameters.fused import fused_tensors
from nano_inference.models.parameters.param import ParamSpec
from nano_inference.models.parameters.table import param_table
from nano_inference.models.spec.model import ModelSpec
from nano_inference.models.spec.quantisation import KEYS
from nano_inference.models.spec.read import CONVERTED
from nano_inference.models.spec.states import IN_TILES

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
WEIGHTS = "model.safetensors"
MASTERS = "masters"  # a subfolder, because some readers load every file next to the weights


def require_savable(source: Path, spec: ModelSpec) -> None:
    """Raise `ConfigError` if other programs could not load a checkpoint of this model."""
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source} has no config.json to save with the weights; save state_dict() yourself."
        )
    if spec.is_text_part:
        raise ConfigError(
            f"checkpoints of {spec.architecture} hold other tensors in addition to the text "
            "model's, which are not loaded here; save state_dict() yourself."
        )


def as_stored(
    weights: Mapping[str, Tensor], spec: ModelSpec, table: tuple[ParamSpec, ...]
) -> dict[str, Tensor]:
    """Return weights under the names of the model's checkpoints.

    If those checkpoints hold all experts of a layer in one tensor, so does the result.
    """
    stored = dict(weights)
    if spec.moe is None or not spec.moe.stacked:
        return stored
    fused = fused_tensors(table)
    for param in table:
        if param.fused and len(param.sources) > 1:
            name = param.fused[0].name
            stored[name] = fused[name].join([stored.pop(each.name) for each in param.sources])
    return stored


def checkpoint_of(model_path: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Return a folder from which transformers can load a model: usually the model's own.

    For a `.gguf` file, save a checkpoint into `folder` and return that.

    Args:
        model_path: As `EngineConfig.model_path`.
        folder: New folder.
        dtype: Dtype of the saved tensors. float32 keeps all digits of the file.

    Raises `ModelLoadError`, and `ConfigError` as `save_checkpoint` does.
    """
    source = resolve_model(model_path)
    if described_by(source) is None:
        return source
    spec = load_spec(source)
    require_savable(source, spec)
    weights = {name: tensor.to(dtype) for name, tensor in read_tensors(source)}
    save_checkpoint(folder, source, as_stored(weights, spec, param_table(spec)), dtype)
    return folder


def save_checkpoint(
    folder: Path, source: Path, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Write weights into a new folder, with configuration and tokenizer of the folder `source`.

    `dtype` is recorded in the configuration. The weights come last and get their final name only
    when complete. Raises `ConfigError` if the folder already holds a model.
    """
    if any(folder.glob("*.safetensors")) or (folder / f"{WEIGHTS}.index.json").exists():
        raise ConfigError(f"{folder} already holds a model; choose a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for fields in (config, config.get("text_config")):
        for name in KEYS if isinstance(fields, dict) else ():
            fields.pop(name, None)  # the saved weights are not quantized
    for name in (CONVERTED, IN_TILES):  # dtype and order are those of the saved weights
        config.pop(name, None)
    for name in {"dtype", "torch_dtype"}.intersection(config) or {"torch_dtype"}:
        config[name] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in (
        *(found for pattern in COPIED for found in source.glob(pattern)),
        source / "generation_config.json",
    ):
        if path.is_file():
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    _save_whole(folder, weights)


def save_masters(folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write a trainer's parameters, each in its own dtype, into a checkpoint's subfolder."""
    (folder / MASTERS).mkdir()
    _save_whole(folder / MASTERS, {name: param.detach() for name, param in parameters.items()})


def load_masters(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read parameters from `save_masters`. Raises `ConfigError` or `ModelLoadError`.

    Names, shapes and dtypes must be those of `like`.
    """
    path = folder / MASTERS / WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no master weights; save_pretrained(folder, masters=True) writes them."
        )
    saved = dict(read_tensors(path))
    for name in sorted(saved.keys() ^ like.keys()):
        which = "lacks" if name in like else "has"
        raise ConfigError(f"{path} {which} {name!r}; load it into the model that saved it.")
    for name, param in like.items():
        if (saved[name].shape, saved[name].dtype) != (param.shape, param.dtype):
            raise ConfigError(
                f"{path} has {name!r} as {saved[name].dtype} {tuple(saved[name].shape)}, but the "
                f"parameter is {param.dtype} {tuple(param.shape)}; load it into the model that "
                "saved it."
            )
    return saved


def _save_whole(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file that gets its final name only when it is complete."""
    unfinished = folder / f"{WEIGHTS}.part"
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in weights.items()}
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS)

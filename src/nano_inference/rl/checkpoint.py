"""Saving parameters as a Hugging Face checkpoint."""

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
MASTERS = "masters"  # a subfolder: readers of checkpoints may take every file beside the weights


def require_savable(source: Path, spec: ModelSpec) -> None:
    """Raise `ConfigError` where a checkpoint of this model would not be one that others read."""
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source} has no config.json to save beside the weights; save state_dict() yourself."
        )
    if spec.is_text_part:
        raise ConfigError(
            f"checkpoints of {spec.architecture} hold more than the text's tensors, which are all "
            "that is here; save state_dict() yourself."
        )


def as_stored(
    weights: Mapping[str, Tensor], spec: ModelSpec, table: tuple[ParamSpec, ...]
) -> dict[str, Tensor]:
    """Weights by the names of the model's checkpoints: all experts of a layer in one tensor, where
    these hold them so.
    """
    found = dict(weights)
    if spec.moe is None or not spec.moe.stacked:
        return found
    fused = fused_tensors(table)
    for param in table:
        if param.fused and len(param.sources) > 1:
            name = param.fused[0].name
            found[name] = fused[name].join([found.pop(each.name) for each in param.sources])
    return found


def checkpoint_of(model_path: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a model as transformers loads it: the model's own, or, of a model that a
    `.gguf` file holds, a checkpoint that is saved into `folder`.

    Args:
        model_path: as `EngineConfig.model_path`.
        folder: a new one.
        dtype: of the tensors that are saved; float32 keeps all digits of the file.

    Raises `ModelLoadError`, and `ConfigError` as `save_checkpoint`.
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
    """Write weights, and the configuration and tokenizer of the model folder `source`, into a new
    folder.

    `dtype` is what the configuration will say.

    The weights come last, under their name only when they are whole. Raises `ConfigError` where the
    folder holds a model already.
    """
    if any(folder.glob("*.safetensors")) or (folder / f"{WEIGHTS}.index.json").exists():
        raise ConfigError(f"{folder} holds a model already; name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for fields in (config, config.get("text_config")):
        for name in KEYS if isinstance(fields, dict) else ():
            fields.pop(name, None)  # what is saved is numbers, whatever it was loaded from
    config.pop(CONVERTED, None)  # and its dtype is theirs
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
    """Write a trainer's parameters, each in its own dtype, below a checkpoint's folder."""
    (folder / MASTERS).mkdir()
    _save_whole(folder / MASTERS, {name: param.detach() for name, param in parameters.items()})


def load_masters(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read what `save_masters` wrote, for parameters like these. Raises `ConfigError` or
    `ModelLoadError`.
    """
    path = folder / MASTERS / WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no master weights; save_pretrained(folder, masters=True) writes them."
        )
    saved = dict(read_tensors(path))
    for name in sorted(saved.keys() ^ like.keys()):
        which = "lacks" if name in like else "has"
        raise ConfigError(f"{path} {which} {name!r}; load it into the model that saved it.")
    for name, param in like.items():
        if (saved[name].shape, saved[name].dtype) != (param.shape, param.dtype):
            raise ConfigError(
                f"{path} has {name!r} as {saved[name].dtype} {tuple(saved[name].shape)}, and the "
                f"parameter is {param.dtype} {tuple(param.shape)}; load it into the model that "
                "saved it."
            )
    return saved


def _save_whole(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file that has its name only when it is whole."""
    unfinished = folder / f"{WEIGHTS}.part"
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in weights.items()}
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS)

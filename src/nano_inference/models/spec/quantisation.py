"""Description of a checkpoint's quantization, from config.json or a file next to it. No tensors."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from nano_inference.errors import ModelLoadError
from nano_inference.models.spec.config_checks import Config
from nano_inference.system.regular_files import read_json

# Keys of `quantised_weights.FORMATS`.
FormatName = Literal[
    "awq", "bitsandbytes-4bit", "bitsandbytes-int8", "fp8", "gguf", "gptq", "int8", "mxfp4",
    "mxfp4-packed", "nvfp4", "nvfp4-modelopt", "packed-int",
]  # fmt: skip
Block = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of a module's weight.

    Attributes:
        format: Format of the stored tensors.
        bits: Bits of a code.
        block: Rows and columns that share a scale. None: all of them.
        symmetric: Codes count from the middle of their range. False: there are zero points.
        zero_offset: Constant to add to stored zero points (GPTQ: 1).
        by_column: A stored tensor assigns each column to a group that shares a scale.
    """

    format: FormatName
    bits: int
    block: Block = (None, None)
    symmetric: bool = True
    zero_offset: int = 0
    by_column: bool = False


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Quantization that a checkpoint declares.

    Attributes:
        method: Name of the quantization method.
        where: File that declares it.
        schemes: Schemes by patterns of module names. The first match applies.
        left_out: Patterns of modules that are stored unquantized.
        activations: Intended quantization of activations, which is not applied here. Empty: none.
    """

    method: str
    where: str
    schemes: tuple[tuple[str, Scheme], ...]
    left_out: tuple[str, ...] = ()
    activations: str = ""

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the storage of a module's weight, or None if unquantized."""
        if any(_compiled(pattern).match(module) for pattern in self.left_out):
            return None
        matching = (each for pattern, each in self.schemes if _compiled(pattern).match(module))
        return next(matching, None)

    def __str__(self) -> str:
        """Return the method and its schemes, for a log line."""
        if self.method == "gguf":  # each matrix has its own scheme
            return "the blocks of a .gguf file"
        kinds = dict.fromkeys(_words(scheme) for _, scheme in self.schemes)
        return f"{self.method} ({'; '.join(kinds)})"

    @property
    def computed(self) -> str:
        """Description of a model loaded with `quantization="file"`, for a log line."""
        return f"quantized with {self}, computed with its own codes"

    def becomes(self, dtype: str) -> str:
        """Describe the dequantized weights, for a log line."""
        left = f"; activations are not quantized to {self.activations}" if self.activations else ""
        return f"quantized with {self}, dequantized to {dtype}{left}"


# Keys of config.json in transformers, in old compressed-tensors and in MLX. Each may also be inside
# `text_config`.
KEYS = ("quantization_config", "compression_config", "quantization")
# Files next to config.json that declare a quantization -> the method.
SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# Fields from which to infer the method if none is named, the most specific first.
_TRACES = {
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "config_groups": "compressed-tensors",
    "quant_algo": "modelopt",
    "w_bit": "awq",
    "desc_act": "gptq",
    "bits": "mlx",
}
GGUF = "gguf"  # written by `checkpoints.gguf` for files whose blocks are used without conversion
_NONE = (None, "", "none", "no_quant")
_ANY = ""  # matches every name


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern, cached: the cache of `re` (512) is too small for some checkpoints."""
    return re.compile(pattern)


def read_quantisation(config: Config, folder: Path | None = None) -> Quantisation | None:
    """Read the quantization of a config.json or of a file next to it in `folder`.

    Returns None if the weights are unquantized. Raises `ModelLoadError` naming the unknown method
    or value.
    """
    for source, fields, default in _descriptions(config, folder):
        method = _method(fields, default) if isinstance(fields, Mapping) else str(fields)
        if method is None:
            return None
        if method not in _READERS or not isinstance(fields, Mapping):
            raise _unknown(method, _detail(fields) if isinstance(fields, Mapping) else "", source)
        try:
            return _READERS[method](_Description(method, source, fields))
        except (TypeError, ValueError, AttributeError, KeyError, re.error) as problem:
            raise ModelLoadError(
                f"{source} describes a quantization ({method}) with a value of the wrong kind: "
                f"{problem}."
            ) from problem
    return None


def quantisation_of(folder: Path) -> Quantisation | None:
    """Read the quantization of a model's folder."""
    path = folder / "config.json"
    return read_quantisation(read_json(path) if path.exists() else {}, folder)


def _descriptions(config: Config, folder: Path | None) -> Iterable[tuple[str, Any, str | None]]:
    """Yield the source of each description, its fields, and the default method."""
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, Mapping) else {}):
        for key in KEYS:
            if source.get(key):
                yield "config.json", source[key], None
    for name, method in SIDE_FILES.items():
        if folder is not None and (folder / name).exists():
            content = read_json(folder / name)
            inner = content.get("quantization")
            yield str(folder / name), inner if isinstance(inner, Mapping) else content, method


def _unknown(method: str, detail: str, where: str) -> ModelLoadError:
    details = f" ({detail})" if detail else ""
    return ModelLoadError(
        f"quantization {method}{details}, declared in {where}, is not supported; use the "
        "unquantized checkpoint, or a GGUF file of the model."
    )


@dataclass(frozen=True, slots=True)
class _Description:
    """Fields of a description, read with errors that name them."""

    method: str
    where: str
    fields: Config

    def refuse(self, detail: str) -> ModelLoadError:
        return _unknown(self.method, detail, self.where)

    def wrong(self, key: str, needed: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.where} describes a quantization ({self.method}) with "
            f"{key}={self.fields.get(key)!r}; it must be {needed}."
        )

    def one_of(self, key: str, known: Iterable[Any], default: Any) -> Any:
        value = self.fields.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or value not in tuple(known):
            raise self.wrong(key, " or ".join(map(str, known)))
        return value

    def group(self, key: str, default: int | None) -> int | None:
        """Return how many columns share a scale. None (-1 in the file): all of them."""
        value = self.fields.get(key)
        value = default if value is None else value
        if value in (None, -1):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a number of columns, or -1 for all")
        return value

    def block(self, key: str) -> Block:
        value = self.fields.get(key)
        sizes = value if isinstance(value, list | tuple) else ()
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise self.wrong(key, "the rows and columns of a block")
        return (sizes[0], sizes[1])

    def names(self, *keys: str) -> list[str]:
        """Return all names listed under these keys."""
        return [str(name) for key in keys for name in self.fields.get(key) or ()]

    def build(
        self,
        *schemes: tuple[str, Scheme],
        left_out: Iterable[str] = (),
        activations: str = "",
    ) -> Quantisation:
        patterns = tuple(left_out)
        for pattern in (*(pattern for pattern, _ in schemes), *patterns):
            _compiled(pattern)
        return Quantisation(self.method, self.where, schemes, patterns, activations)


_LEFT_OUT = ("modules_to_not_convert",)


def _read_one(
    description: _Description,
    scheme: Scheme,
    left_out: tuple[str, ...] = _LEFT_OUT,
    activations: str = "",
) -> Quantisation:
    """Read one scheme for all modules except those listed under the keys `left_out`."""
    patterns = _parts_of_names(description.names(*left_out))
    return description.build((_ANY, scheme), left_out=patterns, activations=activations)


def _read_fp8(description: _Description) -> Quantisation:
    """Read the formats of transformers, DeepSeek and AutoFP8."""
    blocked = description.fields.get("weight_block_size") is not None
    block: Block = description.block("weight_block_size") if blocked else (None, None)
    return _read_one(
        description,
        Scheme("fp8", 8, block),
        (*_LEFT_OUT, "ignored_layers"),
        f"fp8, {description.fields.get('activation_scheme', 'dynamic')}",
    )


_MODELOPT = {
    "FP8": (Scheme("fp8", 8), "fp8, static"),
    "FP8_PB_WO": (Scheme("fp8", 8, (128, 128)), ""),
    "FP8_PER_CHANNEL_PER_TOKEN": (Scheme("fp8", 8, (1, None)), "fp8, dynamic"),
    "NVFP4": (Scheme("nvfp4-modelopt", 4, (1, 16)), "nvfp4"),
}


def _read_modelopt(description: _Description) -> Quantisation:
    algorithm = str(description.fields.get("quant_algo"))
    if algorithm not in _MODELOPT:
        raise description.refuse(algorithm)
    scheme, activations = _MODELOPT[algorithm]
    left_out = (
        _whole_name(fnmatch.translate(name))
        for name in description.names("exclude_modules", "ignore")
    )
    return description.build((_ANY, scheme), left_out=left_out, activations=activations)


def _read_gptq(description: _Description) -> Quantisation:
    if description.fields.get("is_marlin_format"):
        raise description.refuse("marlin format")
    layout = description.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    schemes = [(_ANY, _gptq_scheme(description, layout))]
    left_out: list[str] = []
    # gptqmodel: pattern -> changed fields ("-:" before a pattern: its modules are left out)
    changes = description.fields.get("dynamic") or {}
    for name, fields in changes.items():
        if name.startswith("-:"):
            left_out.append(name[2:])
        else:
            changed = replace(description, fields={**description.fields, **fields})
            schemes.insert(-1, (name.removeprefix("+:"), _gptq_scheme(changed, layout)))
    return description.build(*schemes, left_out=left_out)


def _gptq_scheme(description: _Description, layout: str) -> Scheme:
    symmetric = bool(description.fields.get("sym", True))
    bits = description.one_of("bits", (2, 4, 8), None)
    offset = 1 if layout == "gptq" else 0
    group = (1, description.group("group_size", 128))
    ordered = bool(description.fields.get("desc_act", False))
    return Scheme("gptq", bits, group, symmetric, offset, ordered)


def _read_awq(description: _Description) -> Quantisation:
    for key in ("version", "checkpoint_format", "format"):
        layout = str(description.fields.get(key) or "gemm").lower()
        if layout != "gemm":
            raise description.refuse(layout)
    bits = description.one_of("w_bit" if "w_bit" in description.fields else "bits", (4,), 4)
    group = description.group(
        "q_group_size" if "q_group_size" in description.fields else "group_size", 128
    )
    scheme = Scheme("awq", bits, (1, group), not description.fields.get("zero_point", True))
    return _read_one(description, scheme)


def _read_bitsandbytes(description: _Description) -> Quantisation:
    """Read bitsandbytes. The size of 4-bit blocks is stored with each weight instead."""
    fields = description.fields
    four = bool(fields.get("load_in_4bit") or fields.get("_load_in_4bit"))
    eight = bool(fields.get("load_in_8bit") or fields.get("_load_in_8bit"))
    if four == eight:
        raise description.wrong("load_in_4bit", "the opposite of load_in_8bit")
    scheme = Scheme("bitsandbytes-4bit", 4) if four else Scheme("bitsandbytes-int8", 8, (1, None))
    return _read_one(description, scheme, ("llm_int8_skip_modules",), "int8, dynamic" * eight)


# Format of compressed-tensors -> format here, type of the codes, and their possible bits.
_COMPRESSED: dict[str, tuple[FormatName, str, tuple[int, ...]]] = {
    "float-quantized": ("fp8", "float", (8,)),
    "int-quantized": ("int8", "int", (4, 8)),
    "mxfp4-pack-quantized": ("mxfp4-packed", "float", (4,)),
    "mxfp8-quantized": ("fp8", "float", (8,)),
    "nvfp4-pack-quantized": ("nvfp4", "float", (4,)),
    "pack-quantized": ("packed-int", "int", (2, 4, 8)),
}
_BLOCKS: dict[str, Callable[[_Description], Block]] = {
    "tensor": lambda _: (None, None),
    "channel": lambda _: (1, None),
    "group": lambda weights: (1, weights.group("group_size", None)),
    "tensor_group": lambda weights: (1, weights.group("group_size", None)),
    "block": lambda weights: weights.block("block_structure"),
}


def _read_compressed(description: _Description) -> Quantisation:
    sparse = (description.fields.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise description.refuse(f"{sparse} sparsity")
    if (description.fields.get("transform_config") or {}).get("config_groups"):
        raise description.refuse("transforms of activations")
    targets: list[tuple[int, str, Scheme]] = []
    activations = ""
    for group in (description.fields.get("config_groups") or {}).values():
        if group.get("weights") is None:
            continue
        weights = replace(description, fields=group["weights"])
        scheme = _compressed_scheme(
            weights, group.get("format") or description.fields.get("format")
        )
        targets += [(*_target(str(target)), scheme) for target in group.get("targets") or ()]
        activations = activations or _activations(group.get("input_activations"))
    schemes = [
        (pattern, scheme) for _, pattern, scheme in sorted(targets, key=lambda each: each[0])
    ]
    left_out = (_target(name)[1] for name in description.names("ignore"))
    return description.build(*schemes, left_out=left_out, activations=activations)


def _compressed_scheme(weights: _Description, layout: Any) -> Scheme:
    kind, bits = weights.one_of("type", ("int", "float"), "int"), weights.fields.get("num_bits", 8)
    if layout in (None, "naive-quantized"):
        layout = f"{kind}-quantized"
    if layout not in _COMPRESSED:
        raise weights.refuse(str(layout))
    name, needed, sizes = _COMPRESSED[layout]
    if kind != needed or bits not in sizes:
        raise weights.refuse(f"{layout} of {kind} with {bits} bits")
    group = weights.fields.get("group_size")
    default = "tensor" if group is None else "group" if group > 0 else "channel"
    strategy = weights.one_of("strategy", _BLOCKS, default)
    symmetric = bool(weights.fields.get("symmetric", True))
    ordered = weights.fields.get("actorder") in ("group", "dynamic", True)
    return Scheme(name, bits, _BLOCKS[strategy](weights), symmetric, by_column=ordered)


def _target(target: str) -> tuple[int, str]:
    """Return the precedence of a target of compressed-tensors (lowest first) and its pattern.

    A target is a module's name, a pattern, or a class of modules.
    """
    if target.startswith("re:"):
        return 1, target[3:]
    if "." not in target and target[:1].isupper():
        return 2, r".*embed_tokens$" if target == "Embedding" else r"(?!.*embed_tokens$)"
    return 0, _whole_name(re.escape(target))


def _activations(fields: Any) -> str:
    if not isinstance(fields, Mapping):
        return ""
    kind = "fp" if fields.get("type") == "float" else "int"
    return f"{kind}{fields.get('num_bits', 8)}, {'dynamic' if fields.get('dynamic') else 'static'}"


_READERS: dict[str, Callable[[_Description], Quantisation]] = {
    "awq": _read_awq,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": _read_compressed,
    "fbgemm_fp8": partial(
        _read_one, scheme=Scheme("fp8", 8, (1, None)), activations="fp8, dynamic"
    ),
    "fp8": _read_fp8,
    GGUF: partial(_read_one, scheme=Scheme("gguf", 8), left_out=()),
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "mxfp4": partial(_read_one, scheme=Scheme("mxfp4", 4, (1, 32))),
}


def _parts_of_names(names: Iterable[str]) -> list[str]:
    """Return patterns by transformers' rule: a name's prefix up to a dot, or its end."""
    return [
        rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name.removeprefix('.'))}$" for name in names
    ]


def _whole_name(pattern: str) -> str:
    return rf"(?:{pattern})$"


def _words(scheme: Scheme) -> str:
    """Describe a scheme in words."""
    rows, columns = scheme.block
    if scheme.format == "bitsandbytes-4bit":
        return "4 bits"
    shared = {
        (None, None): "a scale a tensor",
        (1, None): "a scale a row",
    }.get(scheme.block) or f"a scale for {f'{rows} x ' if rows != 1 else ''}{columns}"
    return f"{scheme.bits} bits, {shared}"


def _method(fields: Config, default: str | None) -> str | None:
    """Return the method's name, or None if the description declares no quantization."""
    for key in ("quant_method", "quant_algo"):
        if key in fields and _is_none(fields[key]):
            return None
    if named := fields.get("quant_method"):
        return str(named)
    return default or next(
        (method for field, method in _TRACES.items() if field in fields), "an unnamed method"
    )


def _detail(fields: Config) -> str:
    """Return the bits or the kind of the codes, empty if not declared."""
    bits = next(
        (fields[key] for key in ("bits", "w_bit", "wbits") if isinstance(fields.get(key), int)),
        None,
    )
    if bits is not None:
        return f"{bits} bits"
    kinds = (fields.get(key) for key in ("quant_algo", "quant_type", "weights", "format"))
    return next((kind for kind in kinds if isinstance(kind, str)), "")


def _is_none(value: Any) -> bool:
    return (value.lower() if isinstance(value, str) else value) in _NONE

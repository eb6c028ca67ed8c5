"""LoRA adapters in PEFT's format: reading, checks, and conversion to the decoder's parameters."""

import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nano_inference.arrays import Device, Tensor, is_floating, namespace, without_gradients
from nano_inference.checkpoints.folders import read_json
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.errors import AdapterError, AdapterNotFound, ModelLoadError
from nano_inference.fields.options import is_number, is_whole
from nano_inference.models.parameters.param import ParamSpec
from nano_inference.models.parameters.slots import Slot, slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import holds_numbers
from nano_inference.models.sharding.shard import ModelShard
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.lora import HEAD, Adapter, LoraPart, Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# decoder parameters that accept adapters, by the last part of their names
ADAPTED = ("qkv", "o", "gate_up", "up", "down", "mix_in", "mix_out", "q_a", "q_b", "kv_a")
MOST_RANK = 256
PREFIX = "base_model.model."
BASE = ".base_layer.weight"
# prefixes of the layers of a language model
_OUTER = (
    "",
    "model.",
    "language_model.",
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
)
# settings of PEFT that change the computation and are not supported
_REFUSED = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save"),
    *("alora_invocation_tokens", "layer_replication"),
)
# prefixes of `init_lora_weights` with which PEFT modifies the base model's weights
_OF_OTHER_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of an adapter. Invalid values raise `AdapterError` at construction.

    Attributes:
        rank: Rank of a new adapter's matrices, from 1 to 256.
        alpha: Scale of the adapter: its product is multiplied by alpha / rank.
        targets: Kinds of adapted modules, such as `"q_proj"`. `"all-linear"` means all kinds except
            the head, `"lm_head"`.
        rslora: True to multiply by alpha / sqrt(rank) instead (arXiv:2312.03732).
        seed: Seed of a new adapter's weights.
        alphas: Exceptions to alpha, by the end of a module's name.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = "all-linear"
    rslora: bool = False
    seed: int = 0
    alphas: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not is_whole(self.rank, 1) or self.rank > MOST_RANK:
            raise AdapterError(f"rank={self.rank!r} must be a whole number from 1 to {MOST_RANK}.")
        for alpha in (self.alpha, *(alpha for _, alpha in self.alphas)):
            if not is_number(alpha) or not 0.0 < alpha < math.inf:
                raise AdapterError(f"alpha={alpha!r} must be a finite number above 0.")
        if self.targets != "all-linear" and (
            isinstance(self.targets, str)
            or not self.targets
            or not all(isinstance(each, str) for each in self.targets)
        ):
            raise AdapterError(
                f'targets={self.targets!r} must be "all-linear" or names of modules, such as '
                '("q_proj", "v_proj").'
            )

    def scale(self, rank: int, *modules: str) -> float:
        """Return the scale of an adapter of this rank for a module, given any of its names."""
        matching = (
            alpha
            for end, alpha in self.alphas
            if any(f".{module}".endswith(f".{end}") for module in modules)
        )
        return next(matching, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


class Target(NamedTuple):
    """Module that accepts an adapter."""

    module: str  # name in the checkpoint, such as `model.layers.0.self_attn.q_proj`
    param: str  # decoder parameter that contains the module's weight
    slot: Slot

    @property
    def kind(self) -> str:
        """Last part of the module's name."""
        return self.module.rpartition(".")[2]

    @property
    def divides_output(self) -> bool:
        """True if B has the rank's rows only. A always has all columns."""
        return self.slot.axis == 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of B and columns of A that the rank computes (`own_pair`)."""
        rows, columns = self.slot.shape
        return (self.slot.local_shape[0] if self.divides_output else rows), columns


class Pair(NamedTuple):
    """Matrices of one module's adapter, as PEFT names them."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@lru_cache(maxsize=32)
def targets_of(spec: ModelSpec, part: ModelShard | None = None) -> Mapping[str, Target]:
    """Return the modules that accept adapters, keyed by their name without the model's prefix.

    A key is `layers.0.self_attn.q_proj`, for example.

    Args:
        spec: Description of the whole model.
        part: Part that a rank holds. None: everything.
    """
    table = param_table(spec, part)
    targets = {
        key: Target(name.removesuffix(".weight"), slot.param, slot)
        for name, slot in slots(table).items()
        if (key := within(name)) is not None
        and slot.param.startswith("layers.")
        and slot.param.rpartition(".")[2] in ADAPTED
        and name.endswith(".weight")
    }
    if part is None or part.position.is_last_stage:
        targets["lm_head"] = Target("lm_head", HEAD, _head_slot(spec, table))
    return MappingProxyType(targets)


def _head_slot(spec: ModelSpec, table: Iterable[ParamSpec]) -> Slot:
    """Return the slot of the whole head: tensor ranks gather the logits of a row before they add
    its adapter.
    """
    name = "embed" if spec.tie_word_embeddings else "head"
    (param,) = (each for each in table if each.name == name)
    shape = param.sources[0].shape
    return Slot("lm_head.weight", shape, 0, None, param=HEAD, start=0)


def within(name: str) -> str | None:
    """Return a module's name, starting at its layer, or `lm_head`.

    The prefix depends on the model's class and is removed. Returns None outside of a language
    model.
    """
    module = name.removeprefix(PREFIX).removesuffix(".weight")
    index = module.find("layers.")
    before, rest = (module[:index], module[index:]) if index >= 0 else ("", module)
    if index < 0 and module.endswith("lm_head"):
        before, rest = module.removesuffix("lm_head"), "lm_head"
    return rest if before in _OUTER else None


def chosen(spec: ModelSpec, targets: str | tuple[str, ...]) -> list[Target]:
    """Return the modules of these kinds in the model's order. Raises `AdapterError`."""
    every = targets_of(spec).values()
    if targets == "all-linear":
        return [each for each in every if each.kind != "lm_head"]
    kinds = {each.kind for each in every}
    for kind in targets:
        if kind not in kinds:
            raise AdapterError(
                f"targets: {kind!r} is not an adaptable module of {spec.architecture}; "
                f"use {', '.join(sorted(kinds))}."
            )
    return [each for each in every if each.kind in targets]


def read_folder(
    folder: Path, device: Device | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors (`read_tensors`) and settings of a PEFT folder. Raises `AdapterError`."""
    try:
        if not (folder / CONFIG).exists():
            raise AdapterNotFound(f"{folder} is not an adapter folder: {CONFIG} is missing.")
        config = read_json(folder / CONFIG)
        if not (folder / WEIGHTS).exists():
            raise AdapterError(f"{folder} has no {WEIGHTS}; pickled adapters are not supported.")
        return dict(read_tensors(folder / WEIGHTS, device)), config
    except ModelLoadError as problem:
        raise AdapterError(str(problem)) from problem
    except OSError as problem:
        text = f"{str(folder)[:200]} is not an adapter folder: {problem.strerror}."
        raise AdapterNotFound(text) from problem


def settings_of(config: Mapping[str, Any]) -> LoraSettings:
    """Return the settings of a PEFT configuration. Raises `AdapterError` if it is not supported."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"peft_type={kind!r} is not supported; only LORA is.")
    for name in _REFUSED:
        if config.get(name):
            raise AdapterError(f"{name}={config[name]!r} is not supported; train without it.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OF_OTHER_WEIGHTS):
        raise AdapterError(
            f"init_lora_weights={start!r}: the adapter belongs to base weights that PEFT modified; "
            "save it with path_initial_model_for_weight_conversion."
        )
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias={config['bias']!r} is not supported; train with bias='none'.")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, Mapping) or not all(isinstance(each, str) for each in alphas):
        raise AdapterError(f"alpha_pattern={alphas!r:.100} must map module names to numbers.")
    return LoraSettings(
        rank=config.get("r", 8),
        alpha=config.get("lora_alpha", 8),
        rslora=bool(config.get("use_rslora", False)),
        alphas=tuple((_ending(pattern), alpha) for pattern, alpha in alphas.items()),
    )


def _ending(pattern: str) -> str:
    """Return the ending of module names that a PEFT pattern matches.

    Raises `AdapterError` for others.
    """
    ending = pattern.removeprefix("^").removesuffix("$").removeprefix(".*")
    ending = ending.removeprefix("\\.").replace("\\.", ".")
    if not ending.replace(".", "").replace("_", "").isalnum():
        raise AdapterError(f"alpha_pattern: {pattern!r} must be the end of a module name.")
    return ending


def split_head(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Separate the head's own weight, which PEFT saves with an adapter of the head by default
    (`save_embedding_layers="auto"`).
    """
    pairs, head = dict(tensors), None
    for name in tensors:
        if name.endswith(BASE) and within(name.removesuffix(BASE)) == "lm_head":
            head = pairs.pop(name)
    return pairs, head


def pairs_of(
    tensors: Mapping[str, Tensor], settings: LoraSettings, spec: ModelSpec, most_rank: int
) -> dict[str, Pair]:
    """Return an adapter's matrices by the names of `targets_of`, checked against the model.

    Raises `AdapterError` with the name of the tensor.
    """
    targets, pairs = targets_of(spec), dict[str, Pair]()
    for key, names in _by_place(tuple(tensors), spec).items():
        a, b = (tensors[name] for name in names)
        module, (out, width) = targets[key].module, targets[key].slot.shape
        for half, tensor in zip("AB", (a, b), strict=True):
            if not is_floating(tensor.dtype):
                raise AdapterError(
                    f"lora_{half} of {module!r} is {tensor.dtype}, not a floating point dtype."
                )
            if not holds_numbers(tensor):
                raise AdapterError(
                    f"lora_{half} of {module!r} must be a dense tensor that holds its numbers, "
                    "such as a DTensor's full_tensor()."
                )
        rank = a.shape[0] if a.dim() == 2 else 0
        if a.shape != (rank, width) or b.shape != (out, rank) or not rank:
            raise AdapterError(
                f"lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} of {module!r} do not fit its "
                f"weight ({out}, {width}); the adapter belongs to another base model."
            )
        if rank > most_rank:
            raise AdapterError(f"rank {rank} of {module!r} exceeds max_lora_rank={most_rank}.")
        trained_name = _half(names[0])[0].removeprefix(PREFIX)
        pairs[key] = Pair(a, b, settings.scale(rank, trained_name, module))
    return pairs


def peft_setting(spec: ModelSpec) -> str:
    """Return the `LoraConfig` setting that adapts all supported modules except the head.

    If a model has experts, PEFT adapts them with "all-linear" and with the projections of dense
    layers, so the setting omits these.
    """
    targets = targets_of(spec).values()
    dense = [each for each in targets if spec.moe is None or ".mlp." not in each.module]
    kinds = sorted({each.kind for each in dense} - {"lm_head"})
    return f"target_modules={json.dumps(kinds)}"


@lru_cache(maxsize=8)
def _by_place(names: tuple[str, ...], spec: ModelSpec) -> Mapping[str, tuple[str, str]]:
    """Return the names of A and B of each module, in the model's order."""
    targets, halves = targets_of(spec), dict[str, dict[str, str]]()
    for name in names:
        module, half = _half(name)
        if (key := within(module)) is None or key not in targets:
            raise AdapterError(
                f"{name!r} adapts {module.removeprefix(PREFIX)!r}, which accepts no adapter in "
                f"{spec.architecture}; train with {peft_setting(spec)}."
            )
        if half in halves.setdefault(key, {}):
            raise AdapterError(f"{name!r} is duplicated; give one tensor per matrix.")
        halves[key][half] = name
    for key, pair in halves.items():
        for half in "AB":
            if half not in pair:
                raise AdapterError(f"lora_{half} of {targets[key].module!r} is missing.")
    if not halves:
        raise AdapterError("the adapter is empty; give at least one pair of lora_A and lora_B.")
    return {key: (halves[key]["A"], halves[key]["B"]) for key in targets if key in halves}


def _half(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and its matrix: A or B."""
    for half in "AB":
        for end in (f".lora_{half}.weight", f".lora_{half}.default.weight", f".lora_{half}"):
            if name.endswith(end):
                return name.removesuffix(end), half
    raise AdapterError(
        f"{name!r} is not a LoRA matrix; names must end with lora_A.weight or lora_B.weight."
    )


class Made(NamedTuple):
    """Adapter as a rank computes it, with the whole adapter's largest rank, kinds of modules, and
    size in bytes.
    """

    adapter: Adapter
    rank: int
    kinds: tuple[str, ...]
    num_bytes: int


def pairs_in(adapter: Adapter, spec: ModelSpec) -> dict[str, Pair]:
    """Return the matrices of a whole adapter by the names of `targets_of`, in a checkpoint's order
    of rows and columns.
    """
    every = {(param, part.first): part for param, parts in adapter.parts.items() for part in parts}
    pairs = dict[str, Pair]()
    for key, target in targets_of(spec).items():
        part, slot = every.get((target.param, target.slot.start)), target.slot
        if part is None:
            continue
        pair = Pair(part.a, part.b.T, part.scale)
        if slot.parts is not None:
            half = "a" if slot.axis else "b"
            ordered = getattr(pair, half).clone()
            slot.put(ordered, getattr(pair, half))
            pair = pair._replace(**{half: ordered})
        pairs[key] = pair
    return pairs


def own_pair(target: Target, whole: Target, pair: Pair) -> Pair:
    """Return the matrices of a module as a rank computes them, in the decoder's order of rows and
    columns.

    If ranks divide the module's output, B has the rank's rows. A has all columns, also if ranks
    divide the input.

    Args:
        target: Module as the rank holds it.
        whole: Module of the whole model.
        pair: Whole matrices.
    """
    if target.divides_output:
        return pair._replace(b=target.slot.take(pair.b))
    return pair._replace(a=whole.slot.take(pair.a))


class AdapterMemory:
    """Factory for the adapters of one model that reuses the memory of a removed adapter.

    If modules, shapes and scales are equal, an update only copies the weights.

    Args:
        part: Part of the model that this rank holds.
        placed: `Ops.placed` of the operations that compute the adapters.
    """

    def __init__(
        self,
        part: ModelShard,
        device: Device,
        placed: Callable[[Sequence[Place]], Callable[[Sequence[Tensor]], int]],
    ) -> None:
        self._part, self._device, self._placed = part, device, placed
        self._spare: _Piece | None = None  # memory of the latest removed adapter

    def make(self, name: str, version: int, pairs: Mapping[str, Pair]) -> Made:
        """Copy an adapter's matrices to float32 in the layout of the operations.

        Modules of other stages are left out. Raises `AdapterError` for numbers that are not finite.
        """
        targets, whole = targets_of(self._part.whole, self._part), targets_of(self._part.whole)
        held = {
            key: own_pair(targets[key], whole[key], pair)
            for key, pair in pairs.items()
            if key in targets
        }
        return Made(
            self.make_held(name, version, held),
            max(pair.a.shape[0] for pair in pairs.values()),
            tuple(sorted({whole[key].kind for key in pairs})),
            4 * sum(math.prod(pair.a.shape) + math.prod(pair.b.shape) for pair in pairs.values()),
        )

    def make_held(self, name: str, version: int, pairs: Mapping[str, Pair]) -> Adapter:
        """Make an adapter of the matrices that this rank holds (`own_pair`), possibly none."""
        form = _form_of(pairs)
        piece, self._spare = self._spare, None
        if piece is None or piece.form != form:
            targets = targets_of(self._part.whole, self._part)
            piece = _Piece(form, targets, self._device, self._placed)
        try:
            piece.write(pairs)
        except BaseException:
            self._spare = piece
            raise
        adapter = Adapter(name, version, piece.parts, piece.packed)
        # reuse the memory only after the adapter's last reader
        weakref.finalize(adapter, self._keep, piece).atexit = False
        return adapter

    def _keep(self, piece: "_Piece") -> None:
        self._spare = piece


# for each module: key, shapes of A and B, scale
_Form = tuple[tuple[str, tuple[int, ...], tuple[int, ...], float], ...]


def _form_of(pairs: Mapping[str, Pair]) -> _Form:
    return tuple(
        (place, tuple(a.shape), tuple(b.shape), scale) for place, (a, b, scale) in pairs.items()
    )


class _Piece:
    """Memory for adapters of one form."""

    def __init__(
        self,
        form: _Form,
        targets: Mapping[str, Target],
        device: Device,
        placed: Callable[[Sequence[Place]], Callable[[Sequence[Tensor]], int]],
    ) -> None:
        self.form, self.packed = form, dict[Any, Any]()
        self._targets = [targets[place] for place, *_ in form]
        # shapes of A [rank, in] and of B, transposed
        shapes = [(a, (b[1], b[0])) for _, a, b, _ in form]
        # align each to 64 bytes
        sizes = [-(-rows * columns // 16) * 16 for pair in shapes for rows, columns in pair]
        memory = namespace(device).empty(sum(sizes), device=device)
        pieces = iter(memory.split(sizes) if sizes else ())
        parts, places = dict[str, list[LoraPart]](), list[Place]()
        for target, (_, _, _, scale), pair in zip(self._targets, form, shapes, strict=True):
            a, b = (next(pieces)[: rows * size].reshape(rows, size) for rows, size in pair)
            parts.setdefault(target.param, []).append(LoraPart(target.slot.start, a, b, scale))
            places += [Place(a, turned=False), Place(b, turned=True)]
        self.parts = {
            param: tuple(sorted(group, key=lambda part: part.first))
            for param, group in parts.items()
        }
        self._write = placed(places)

    @without_gradients
    def write(self, pairs: Mapping[str, Pair]) -> None:
        """Write an adapter's matrices.

        Raises `AdapterError` after the write if a number is not finite.
        """
        wrong = self._write([half for pair in pairs.values() for half in (pair.a, pair.b)])
        if wrong >= 0:
            module = self._targets[wrong // 2].module
            raise AdapterError(f"lora_{'AB'[wrong % 2]} of {module!r} is not finite.")

"""Adapters of low rank as PEFT stores them: read, checked against a model, and brought to its
decoder's parameters.
"""

import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_inference.checkpoints.folders import read_json
from nano_inference.checkpoints.loading import read_tensors
from nano_inference.errors import AdapterError, AdapterNotFound, ModelLoadError
from nano_inference.fields.options import is_number, is_whole
from nano_inference.models.parameters.param import ParamSpec
from nano_inference.models.parameters.slots import Slot, slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import holds_numbers
from nano_inference.models.spec.model import ModelSpec
from nano_inference.ops.lora import HEAD, Adapter, LoraPart, Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# parameters of the decoder whose products take adapters, by the end of their names
ADAPTED = ("qkv", "o", "gate_up", "up", "down", "mix_in", "mix_out", "q_a", "q_b", "kv_a")
MOST_RANK = 256
PREFIX = "base_model.model."
BASE = ".base_layer.weight"
# what stands before a layer of a language model
_OUTER = (
    "",
    "model.",
    "language_model.",
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
)
# settings of PEFT's that change what is computed, and are not computed here
_REFUSED = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "modules_to_save"),
    *("alora_invocation_tokens", "layer_replication"),
)
# beginnings of `init_lora_weights` under which PEFT took something off the base model's weights
_OF_OTHER_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What an adapter is besides its numbers. Checked at construction: `AdapterError`.

    Attributes:
        rank: of its matrices, where it is made new; from 1 to 256.
        alpha: what it adds is multiplied by alpha / rank.
        targets: kinds of modules that it adapts, such as `"q_proj"`; `"all-linear"`: all that take
            adapters but the head, `"lm_head"`.
        rslora: it is multiplied by alpha / sqrt(rank) instead (arXiv:2312.03732).
        seed: of the numbers of a new one.
        alphas: of modules whose names end so, instead of alpha.
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
        """What an adapter of this rank is multiplied by, of a module, by any of its names."""
        own = (
            alpha
            for end, alpha in self.alphas
            if any(f".{module}".endswith(f".{end}") for module in modules)
        )
        return next(own, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


class Target(NamedTuple):
    """A module that an adapter may change."""

    module: str  # its name in the checkpoint, as `model.layers.0.self_attn.q_proj`
    param: str  # the decoder's weight that holds it
    slot: Slot

    @property
    def kind(self) -> str:
        """The last part of its name."""
        return self.module.rpartition(".")[2]


class Pair(NamedTuple):
    """An adapter's matrices of one module, as PEFT names them."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


@lru_cache(maxsize=8)
def targets_of(spec: ModelSpec) -> Mapping[str, Target]:
    """The modules of a model that take adapters, by what follows their model's own prefix:
    `layers.0.self_attn.q_proj`.
    """
    table = param_table(spec)
    found = {
        place: Target(name.removesuffix(".weight"), slot.param, slot)
        for name, slot in slots(table).items()
        if (place := within(name)) is not None
        and slot.param.startswith("layers.")
        and slot.param.rpartition(".")[2] in ADAPTED
        and name.endswith(".weight")
    }
    head = _head_slot(spec, table)
    return MappingProxyType(found | {"lm_head": Target("lm_head", HEAD, head)})


def _head_slot(spec: ModelSpec, table: Iterable[ParamSpec]) -> Slot:
    name = "embed" if spec.tie_word_embeddings else "head"
    (param,) = (each for each in table if each.name == name)
    shape = param.sources[0].shape
    return Slot("lm_head.weight", shape, 0, None, param=HEAD, start=0)


def within(name: str) -> str | None:
    """A module's name from its layer on, or `lm_head`: what stands before, the classes of a model
    disagree about. None: it is no part of a language model.
    """
    module = name.removeprefix(PREFIX).removesuffix(".weight")
    place = module.find("layers.")
    before, own = (module[:place], module[place:]) if place >= 0 else ("", module)
    if place < 0 and module.endswith("lm_head"):
        before, own = module.removesuffix("lm_head"), "lm_head"
    return own if before in _OUTER else None


def chosen(spec: ModelSpec, targets: str | tuple[str, ...]) -> list[Target]:
    """The modules of these kinds, in the model's order. Raises `AdapterError`."""
    every = targets_of(spec).values()
    if targets == "all-linear":
        return [each for each in every if each.kind != "lm_head"]
    kinds = {each.kind for each in every}
    for kind in targets:
        if kind not in kinds:
            raise AdapterError(
                f"targets: {kind!r} is no module of {spec.architecture} that takes an adapter; "
                f"these are: {', '.join(sorted(kinds))}."
            )
    return [each for each in every if each.kind in targets]


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the settings of a PEFT folder. Raises `AdapterError`."""
    try:
        if not (folder / CONFIG).exists():
            raise AdapterNotFound(f"{folder} is not an adapter's folder: {CONFIG} is missing.")
        config = read_json(folder / CONFIG)
        if not (folder / WEIGHTS).exists():
            raise AdapterError(f"{folder} holds no {WEIGHTS}; pickled adapters are not read.")
        return dict(read_tensors(folder / WEIGHTS)), config
    except ModelLoadError as problem:
        raise AdapterError(str(problem)) from problem
    except OSError as problem:
        text = f"{str(folder)[:200]} is not an adapter's folder: {problem.strerror}."
        raise AdapterNotFound(text) from problem


def settings_of(config: Mapping[str, Any]) -> LoraSettings:
    """What a PEFT configuration says. Raises `AdapterError` for what is not computed here."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"peft_type={kind!r} is not served; LORA is.")
    for name in _REFUSED:
        if config.get(name):
            raise AdapterError(f"{name}={config[name]!r} is not served; leave it out.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OF_OTHER_WEIGHTS):
        raise AdapterError(
            f"init_lora_weights={start!r}: the adapter is of weights that PEFT changed; save it "
            "with path_initial_model_for_weight_conversion."
        )
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias={config['bias']!r} is not served; train with bias='none'.")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, Mapping) or not all(isinstance(each, str) for each in alphas):
        raise AdapterError(f"alpha_pattern={alphas!r:.100} must map modules' names to numbers.")
    return LoraSettings(
        rank=config.get("r", 8),
        alpha=config.get("lora_alpha", 8),
        rslora=bool(config.get("use_rslora", False)),
        alphas=tuple((_ending(pattern), alpha) for pattern, alpha in alphas.items()),
    )


def _ending(pattern: str) -> str:
    """The modules' ending that a pattern of PEFT's stands for. Raises `AdapterError` for one that
    says more.
    """
    ending = pattern.removeprefix("^").removesuffix("$").removeprefix(".*")
    ending = ending.removeprefix("\\.").replace("\\.", ".")
    if not ending.replace(".", "").replace("_", "").isalnum():
        raise AdapterError(f"alpha_pattern: {pattern!r} must be the end of a module's name.")
    return ending


def split_head(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Split off the head's own weight, which PEFT saves with an adapter of the head by default
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
    """An adapter's matrices by the names of `targets_of`, checked against the model. Raises
    `AdapterError`, which names the tensor.
    """
    targets, found = targets_of(spec), dict[str, Pair]()
    for place, names in _by_place(tuple(tensors), spec).items():
        a, b = (tensors[name] for name in names)
        module, (out, width) = targets[place].module, targets[place].slot.shape
        for half, tensor in zip("AB", (a, b), strict=True):
            if not tensor.is_floating_point():
                raise AdapterError(
                    f"lora_{half} of {module!r} is {tensor.dtype}, not a floating point dtype."
                )
            if not holds_numbers(tensor):
                raise AdapterError(
                    f"lora_{half} of {module!r} must be a dense tensor that holds its numbers, as "
                    "a DTensor's full_tensor()."
                )
        rank = a.shape[0] if a.dim() == 2 else 0
        if a.shape != (rank, width) or b.shape != (out, rank) or not rank:
            raise AdapterError(
                f"lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} of {module!r} do not fit its "
                f"weight ({out}, {width}); the adapter is of another base model."
            )
        if rank > most_rank:
            raise AdapterError(f"{module!r} has rank {rank}, above max_lora_rank={most_rank}.")
        own = _half(names[0])[0].removeprefix(PREFIX)  # as the trained class calls it
        found[place] = Pair(a, b, settings.scale(rank, own, module))
    return found


def peft_setting(spec: ModelSpec) -> str:
    """Return the setting of `LoraConfig` that adapts all that takes an adapter, but the head.

    Where a model has experts, PEFT adapts them too if it is given "all-linear" or a projection of
    its dense layers; so these are left out.
    """
    targets = targets_of(spec).values()
    dense = [each for each in targets if spec.moe is None or ".mlp." not in each.module]
    kinds = sorted({each.kind for each in dense} - {"lm_head"})
    return f"target_modules={json.dumps(kinds)}"


@lru_cache(maxsize=8)
def _by_place(names: tuple[str, ...], spec: ModelSpec) -> Mapping[str, tuple[str, str]]:
    """The names of A and B of each module, in the model's order."""
    targets, halves = targets_of(spec), dict[str, dict[str, str]]()
    for name in names:
        module, half = _half(name)
        if (place := within(module)) is None or place not in targets:
            raise AdapterError(
                f"{name!r} adapts {module.removeprefix(PREFIX)!r}, which takes no adapter in "
                f"{spec.architecture}; train with {peft_setting(spec)}."
            )
        if half in halves.setdefault(place, {}):
            raise AdapterError(f"{name!r} is there twice.")
        halves[place][half] = name
    for place, own in halves.items():
        for half in "AB":
            if half not in own:
                raise AdapterError(f"lora_{half} of {targets[place].module!r} is missing.")
    if not halves:
        raise AdapterError("the adapter is empty; give at least one pair of lora_A and lora_B.")
    return {place: (halves[place]["A"], halves[place]["B"]) for place in targets if place in halves}


def _half(name: str) -> tuple[str, str]:
    """The module of a tensor, and which of its matrices it is."""
    for half in "AB":
        for end in (f".lora_{half}.weight", f".lora_{half}.default.weight", f".lora_{half}"):
            if name.endswith(end):
                return name.removesuffix(end), half
    raise AdapterError(
        f"{name!r} is no matrix of an adapter of low rank; those end with lora_A.weight or "
        "lora_B.weight."
    )


class Made(NamedTuple):
    """An adapter, its largest rank, the kinds of modules that it adapts, and its numbers' bytes."""

    adapter: Adapter
    rank: int
    kinds: tuple[str, ...]
    num_bytes: int


class AdapterMemory:
    """Makes the adapters of one model. The memory of one that is gone is kept for the next: where
    modules, shapes and scales are the same, an update writes its numbers and no more.

    Args:
        placed: `Ops.placed` of what computes them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        placed: Callable[[Sequence[Place]], Callable[[Sequence[Tensor]], int]],
    ) -> None:
        self._spec, self._device, self._placed = spec, device, placed
        self._spare: _Piece | None = None  # of the adapter that went last

    def make(self, name: str, version: int, pairs: Mapping[str, Pair]) -> Made:
        """Copies of an adapter's matrices, in float32, as the operations read them. Raises
        `AdapterError` for numbers that are not finite.
        """
        form = _form_of(pairs)
        piece, self._spare = self._spare, None
        if piece is None or piece.form != form:
            piece = _Piece(form, targets_of(self._spec), self._device, self._placed)
        try:
            piece.write(pairs)
        except BaseException:
            self._spare = piece
            raise
        adapter = Adapter(name, version, piece.parts, piece.packed)
        # not before nothing reads it any more
        weakref.finalize(adapter, self._keep, piece).atexit = False
        return Made(adapter, piece.rank, piece.kinds, piece.num_bytes)

    def _keep(self, piece: "_Piece") -> None:
        self._spare = piece


# of each module its place, the shapes of A and B, and the scale
_Form = tuple[tuple[str, torch.Size, torch.Size, float], ...]


def _form_of(pairs: Mapping[str, Pair]) -> _Form:
    return tuple((place, a.shape, b.shape, scale) for place, (a, b, scale) in pairs.items())


class _Piece:
    """Memory for an adapter of one form."""

    def __init__(
        self,
        form: _Form,
        targets: Mapping[str, Target],
        device: torch.device,
        placed: Callable[[Sequence[Place]], Callable[[Sequence[Tensor]], int]],
    ) -> None:
        self.form, self.packed = form, dict[Any, Any]()
        self._targets = [targets[place] for place, *_ in form]
        self.kinds = tuple(sorted({target.kind for target in self._targets}))
        self.rank = max(a[0] for _, a, _, _ in form)
        # what this rank takes of A [rank, in] and, turned, of B
        shapes = [
            [(a[0], size) for size in reversed(target.slot.local_shape)]
            for target, (_, a, _, _) in zip(self._targets, form, strict=True)
        ]
        self.num_bytes = 4 * sum(rows * columns for pair in shapes for rows, columns in pair)
        # each begins at a multiple of 64 bytes
        sizes = [-(-rows * columns // 16) * 16 for pair in shapes for rows, columns in pair]
        pieces = iter(torch.empty(sum(sizes), device=device).split(sizes))
        parts, places = dict[str, list[LoraPart]](), list[Place]()
        for target, (_, _, _, scale), pair in zip(self._targets, form, shapes, strict=True):
            a, b = (next(pieces)[: rows * size].view(rows, size) for rows, size in pair)
            parts.setdefault(target.param, []).append(LoraPart(target.slot.start, a, b, scale))
            places += [Place(a, turned=False), Place(b, turned=True)]
        self.parts = {
            param: tuple(sorted(own, key=lambda part: part.first)) for param, own in parts.items()
        }
        self._write = placed(places)

    def write(self, pairs: Mapping[str, Pair]) -> None:
        """Raises `AdapterError` for numbers that are not finite, which are written by then."""
        sources: list[Tensor] = []
        with torch.no_grad():
            for target, (a, b, _) in zip(self._targets, pairs.values(), strict=True):
                if target.slot.parts is not None:
                    axis, take = target.slot.axis, target.slot.take
                    a, b = (a, take(b)) if axis == 0 else (take(a), b)
                sources += (a, b)
            wrong = self._write(sources)
        if wrong >= 0:
            module = self._targets[wrong // 2].module
            raise AdapterError(f"lora_{'AB'[wrong % 2]} of {module!r} is not finite.")

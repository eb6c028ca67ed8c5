"""`LoraPolicy`: the trainer's adapter on the engine's own weights, with the engine's
logprobs bit for bit.
"""

import itertools
import json
import math
import os
import threading
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nano_inference.checkpoints.lora import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterMemory,
    LoraSettings,
    Pair,
    Target,
    chosen,
    pairs_of,
    read_folder,
    settings_of,
    split_head,
    within,
)
from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.engine.adapters import AdapterInfo
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import AdapterError, ConfigError
from nano_inference.models.parameters.table import param_table
from nano_inference.ops.lora import HEAD, Adapter
from nano_inference.rl.backward.weights import AdapterPart, LazyParams, Totals, Weights
from nano_inference.rl.micro_batch import MicroBatch, ScoredSequence, micro_batches
from nano_inference.rl.parameter_states import State, states
from nano_inference.rl.ranks import follow
from nano_inference.rl.scoring import BatchScores, ScoreBatch, score_batch
from nano_inference.rl.scoring_module import (
    ScoringModule,
    dtype_of_products,
    place_param,
    running,
    sum_of_parts,
)
from nano_inference.rl.tensors import numbers, torch_device
from nano_inference.rl.torch_decoder import LORA
from nano_inference.types import KvPolicy

_NUMBERS = itertools.count(1)
_A, _B = "lora_A.weight", "lora_B.weight"


class LoraPolicy(ScoringModule):
    """A LoRA adapter as parameters under PEFT's names, with logprobs from the engine's operations.

    Forward: the engine scores the sequences with a copy of the matrices on top of its own weights.
    The bits equal those of samples that it draws with the same adapter. Backward: a forward pass at
    the same weights is differentiated with respect to the matrices only, sequence by sequence in a
    fixed order, by the kernels or in torch (`gradients`, as in `PolicyModel`).

    A starts with uniform numbers (Kaiming, as in PEFT), B with zeros: a new adapter changes
    nothing. Parameters are on the engine's device.

    If several ranks share the engine's model, rank 0 holds a second, whole copy of the weights for
    the logprobs, which follows updates of the engine.

    Args:
        engine: Engine that accepts adapters (`max_loras`), or a configuration to build one from.
        settings: Rank, alpha, targets and seed. None: the defaults.
        name: Name under which `publish` serves the adapter.
        micro_batch_tokens: As in `PolicyModel`.
        num_workers: As in `PolicyModel`.
        gradient_dtype: Dtype of a backward pass's products with the frozen weights, as in
            `PolicyModel`. The adapter's products are float32.
        recompute_activations: As in `PolicyModel`.
    """

    def __init__(
        self,
        engine: InferenceEngine | EngineConfig,
        settings: LoraSettings | None = None,
        *,
        name: str = "trainer",
        micro_batch_tokens: int = 512,
        num_workers: int | None = None,
        gradient_dtype: torch.dtype | None = None,
        recompute_activations: bool | None = None,
    ) -> None:
        super().__init__(engine, micro_batch_tokens, num_workers, recompute_activations)
        settings = settings or LoraSettings()
        spec, model = self.scorer.spec, self.scorer.model
        device = torch_device(model.device)
        if not model.ops.has_adapters or (device.type == "cuda" and model.ops.name != "cuda"):
            raise ConfigError(
                f"backend {model.ops.name!r} on {model.device} does not support adapters; use "
                'backend="cuda" on a GPU, "cpu" or "reference" on a CPU.'
            )
        most = self.engine.config.max_lora_rank
        if settings.rank > most:
            raise AdapterError(f"rank={settings.rank} exceeds max_lora_rank={most}.")
        self.settings, self.name = settings, name
        self._targets = chosen(spec, settings.targets)
        generator = torch.Generator().manual_seed(settings.seed)
        for target in self._targets:
            out, width = target.slot.shape
            bound = 1 / math.sqrt(width)
            # `uniform_` of another range would round once on some processors, twice on others
            a = torch.rand(settings.rank, width, generator=generator) * (2 * bound) - bound
            place_param(self, f"{PREFIX}{target.module}.{_A}", nn.Parameter(a.to(device)))
            b = torch.zeros(out, settings.rank, device=device)
            place_param(self, f"{PREFIX}{target.module}.{_B}", nn.Parameter(b))
        # modules that hold the parameters, so that replaced parameters are seen
        self._owners: list[tuple[str, Any, Any]] = [
            (key, self._owner(target, "lora_A"), self._owner(target, "lora_B"))
            for key, target in self._by_key()
        ]
        self._memory = AdapterMemory(model.part, model.device, model.ops.placed)
        self._products = dtype_of_products(self.scorer, gradient_dtype, self.gradients)
        self._decoder = self._torch_decoder(self._products)
        self._float32 = {p.name for p in param_table(spec) if p.keep_float32}
        # the engine's weights, converted one at a time: there is no second copy of the model
        self._frozen = LazyParams(model.params, self._converted)
        self._lock = threading.Lock()
        self._scoring: tuple[list[State], Adapter] | None = None

    def _require_trainable(self) -> None:
        spec = self.engine.spec
        if spec.state is not None or spec.moe is not None:
            kind = "experts" if spec.moe is not None else "layers that carry a state"
            raise ConfigError(
                f"LoraPolicy has no gradients for {spec.architecture}, because it has {kind}; "
                "choose another model."
            )

    def publish(
        self,
        name: str | None = None,
        *,
        version: int | None = None,
        kv_policy: KvPolicy = "finish_old",
    ) -> AdapterInfo:
        """Serve the current adapter as a new version of `name` (None: the `name` of this policy).

        Options are those of `engine.load_adapter`.
        """
        served = self.engine.adapter_table
        return served.take(name or self.name, self._pairs(), version, kv_policy)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that PEFT and `engine.load_adapter` can read.

        Raises `ConfigError` if the folder already holds an adapter.
        """
        path = Path(folder)
        if (path / WEIGHTS).exists():
            raise ConfigError(f"{path} already holds an adapter; choose a new folder.")
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.engine.config.model_path),
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "use_rslora": self.settings.rslora,
            "target_modules": sorted({target.kind for target in self._targets}),
            "bias": "none",
            "lora_dropout": 0.0,
            "inference_mode": True,
        }
        (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        tensors = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        save_file(tensors, path / WEIGHTS)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load the values of a PEFT folder of the same rank, alpha and modules.

        Raises `AdapterError`, with nothing changed.
        """
        tensors, config = read_folder(Path(folder))
        tensors, _ = split_head(tensors)
        spec, most = self.engine.spec, self.engine.config.max_lora_rank
        pairs = pairs_of(tensors, settings_of(config), spec, most)
        current = self._pairs()
        for key in {*pairs, *current}:
            if key not in pairs or key not in current:
                problem = "is not in" if key in current else "is only in"
                raise AdapterError(
                    f"{key} {problem} {folder}; its targets must be those of this adapter."
                )
            if pairs[key].a.shape != current[key].a.shape or pairs[key].scale != current[key].scale:
                raise AdapterError(
                    f"{key} has another rank or scale in {folder}; both must equal this adapter's."
                )
            if not all(bool(half.isfinite().all()) for half in pairs[key][:2]):
                raise AdapterError(f"{key} has non-finite values in {folder}.")
        with torch.no_grad():
            for key, pair in pairs.items():
                current[key].a.copy_(pair.a)
                current[key].b.copy_(pair.b)

    def _pairs(self) -> dict[str, Pair]:
        """Return the parameters by the names of `targets_of`."""
        scale = self.settings.scale(self.settings.rank)
        return {key: Pair(a["weight"], b["weight"], scale) for key, a, b in self._owners}

    def _owner(self, target: Target, half: str) -> Any:
        return self.get_submodule(f"{PREFIX}{target.module}.{half}")._parameters

    def _by_key(self) -> Iterator[tuple[str, Target]]:
        for target in self._targets:
            yield within(target.module) or target.module, target

    def _score(self, batch: ScoreBatch) -> tuple[BatchScores, list[State]]:
        """Return the scores, and the parameters' states from which they were computed."""
        with self._lock:
            if self.scorer is not self.engine:
                follow(self.engine, self.scorer)
            now = states([*self.parameters()])
            if self._scoring is None or self._scoring[0] != now:
                # a name that is not served, and a number that no other policy has used
                name, number = f"{self.name}\n", next(_NUMBERS)
                self._scoring = now, self._memory.make(name, number, self._pairs()).adapter
            return score_batch(self.scorer, batch, POLICY, self._scoring[1]), now

    def _base_version(self) -> int | None:
        asleep = not self.engine.shared.life.has_weights
        return None if asleep else self.engine.get_weight_version()

    def _gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        if self.gradients == "kernels":
            return self._kernel_gradients(scored, values, temperature)
        device = torch_device(self.scorer.model.device)

        def compute(part: MicroBatch) -> dict[str, Tensor]:
            with torch.enable_grad():
                leaves = {name: v.detach().float().requires_grad_() for name, v in values.items()}
                params, head = self._with_adapter(leaves)
                inner = {n: v for n, v in leaves.items() if not n.startswith(f"{PREFIX}lm_head.")}
                gradients = self._decoder.adapter_gradients(
                    params, [*inner.values()], head, part.to(device), temperature
                )
            outer = [name for name in leaves if name not in inner]
            return dict(zip([*inner, *outer], gradients, strict=True))

        parts = micro_batches(scored, self.micro_batch_tokens)
        totals = sum_of_parts(parts, compute, device, self.num_workers)
        return {
            name: totals[name] if name in totals else torch.zeros_like(value)
            for name, value in values.items()
        }

    def _converted(self, name: str) -> Tensor:
        weight = numbers(self.scorer.model.params[name])
        return weight.float() if name in self._float32 else weight.to(self._products)

    def _kernel_gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        scale, decoder = self.settings.scale(self.settings.rank), self._kernel_decoder()
        adapters: dict[str, list[AdapterPart]] = {}
        for target in self._targets:
            names = [f"{PREFIX}{target.module}.{half}" for half in (_A, _B)]
            a, b = (values[name].detach().float().contiguous() for name in names)
            head = target.param == HEAD
            part = AdapterPart(0 if head else target.slot.start, a, b, scale, *names)
            adapters.setdefault(decoder.head if head else target.param, []).append(part)
        kernels = self._kernels(self._products)
        weights = Weights(kernels, self._frozen, adapters)
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        totals = Totals(shapes, kernels.device)
        with running(kernels):
            for batch in micro_batches(scored, self.micro_batch_tokens):
                decoder.add_gradients(weights, batch, temperature, totals)
        return {name: total for name in values if (total := totals.total(name)) is not None}

    def _with_adapter(
        self, leaves: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], tuple[Tensor, Tensor, float] | None]:
        """Return the decoder's parameters with the adapter's, and the adapter's head matrices."""
        scale, head = self.settings.scale(self.settings.rank), None
        added: dict[str, list[tuple[int, Tensor, Tensor, float]]] = {}
        for target in self._targets:
            a, b = (leaves[f"{PREFIX}{target.module}.{half}"] for half in (_A, _B))
            if target.param == HEAD:
                head = a.detach(), b.detach(), scale
                continue
            slot = target.slot
            a, b = (a, slot.take(b)) if slot.axis == 0 else (slot.take(a), b)
            added.setdefault(target.param + LORA, []).append((slot.start, a, b.T, scale))
        return ChainMap(added, self._frozen), head  # pyright: ignore[reportArgumentType]

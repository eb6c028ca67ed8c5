"""`PolicyModel`: the trainer's copy of the policy, whose logprobs are the engine's to the bit."""

import itertools
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.checkpoints.loading import load_params
from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import allocate, form_of, formats_of
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import as_held, read, write
from nano_inference.models.routes import RouteRecord
from nano_inference.rl.checkpoint import (
    as_stored,
    load_masters,
    require_savable,
    save_checkpoint,
    save_masters,
)
from nano_inference.rl.micro_batch import MicroBatch, ScoredSequence, micro_batches
from nano_inference.rl.parameter_states import State, states
from nano_inference.rl.scoring import BatchScores, ScoreBatch, require_same_experts, score_batch
from nano_inference.rl.scoring_module import (
    ScoringModule,
    place_param,
    require_chosen_codes,
    sum_of_parts,
)
from nano_inference.weights.update import WeightUpdate

WEIGHT_SET = "trainer"


class PolicyModel(ScoringModule):
    """Ordinary parameters under the checkpoint's names, and their logprobs by the engine's own
    operations.

    Forward: the parameters, cast to the engine's dtype, score the sequences in the engine, as a
    weight set of their own (`"trainer"`). So logprobs equal to the bit what the engine reports
    under the same weights, and are computed from the parameters as they are. Backward: a forward in
    plain torch at the same cast weights is differentiated, sequence by sequence in a fixed order,
    every row through the experts that the engine's forward chose for it; the cast passes gradients
    as they are. Of quantised weights (`EngineConfig.quantization`) it is a forward at the numbers
    that the codes stand for, with inputs that are not rounded to codes, and gradients pass the
    rounding of weights as they are too. Keys and values are rounded as the engine keeps them
    (`EngineConfig.kv_cache_dtype`), and gradients pass that too. Gradients have the same bits
    whatever the number of threads and the engine's options are, on processors for which torch takes
    the same kernels.

    Args:
        engine: an engine, or the configuration to build one from (`model.engine`).
        dtype: of the parameters. In float32 they start with the checkpoint's digits, as far as the
            engine still serves the checkpoint.
        micro_batch_tokens: rows whose gradients are computed together. It bounds the memory of a
            backward pass, and it decides the order of additions: another number gives other last
            bits.
        num_workers: micro-batches in computation at once, each on one thread; no bit depends on it.
            None: as many as torch has threads now.
        gradient_dtype: of the products of a backward pass, at the same rounded weights: float32 or
            bfloat16. None: as the engine's, but float32 on processors that do not multiply
            bfloat16 natively, where torch's products of it take 8 to 50 times as long. Where they
            do it takes half the time.
    """

    def __init__(
        self,
        engine: InferenceEngine | EngineConfig,
        *,
        dtype: torch.dtype = torch.float32,
        micro_batch_tokens: int = 512,
        num_workers: int | None = None,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        if not dtype.is_floating_point:
            raise ConfigError(
                f"dtype={dtype} must be a floating point dtype, such as torch.float32."
            )
        super().__init__(engine, micro_batch_tokens, num_workers)
        require_chosen_codes(self.engine, "PolicyModel")
        if self.engine.spec.state is not None:
            raise ConfigError(
                f"PolicyModel has no gradients for {self.engine.spec.architecture}, whose layers "
                "carry a state; the engine itself serves and scores it."
            )
        self._table = param_table(self.engine.spec)
        self._slots = slots(self._table)
        for name, tensor in _initial_weights(self.engine, dtype).items():
            place_param(self, name, nn.Parameter(tensor))
        self._trainer = _TrainerWeights(self.engine)
        self._decoder = self._torch_decoder(gradient_dtype)

    def publish(self, *, blocking: bool = True, **options: Any) -> WeightUpdate:
        """Let the engine serve the parameters as a new version; options are those of
        `engine.update_weights`.
        """
        with torch.no_grad():
            return self.engine.update_weights(
                dict(self.named_parameters()), blocking=blocking, **options
            )

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        masters: bool = False,
    ) -> None:
        """Save the parameters as a checkpoint that this engine and transformers load, with the
        engine's tokenizer.

        Args:
            folder: a new one.
            dtype: of the tensors; None: each as the engine holds it, so that an engine on the
                checkpoint has the bits of `publish`.
            masters: also save the parameters in their own dtype (float32, say), in the subfolder
                `masters`. `load_masters` reads them, so that a run resumes without a rounding.

        Raises `ConfigError` for a folder that holds a model, and for a model whose checkpoints hold
        more than the text's tensors.
        """
        require_savable(self.engine.model_folder, self.engine.spec)
        own = self.engine.model  # which may hold norms in float32
        dtypes = {name: dtype or own.params[slot.param].dtype for name, slot in self._slots.items()}
        weights = {name: param.detach().to(dtypes[name]) for name, param in self.named_parameters()}
        weights = as_stored(weights, self.engine.spec, self._table)
        save_checkpoint(Path(folder), self.engine.model_folder, weights, dtype or own.dtype)
        if masters:
            save_masters(Path(folder), dict(self.named_parameters()))

    def load_masters(self, folder: str | os.PathLike[str]) -> None:
        """Set the parameters to those of `save_pretrained(folder, masters=True)`, bit for bit. The
        engine serves them after `publish`.

        Raises `ConfigError` or `ModelLoadError`, with nothing changed, for a folder without master
        weights, and for those of another model or dtype.
        """
        own = dict(self.named_parameters())
        saved = load_masters(Path(folder), own)
        with torch.no_grad():
            for name, param in own.items():
                param.copy_(saved[name])

    def close(self) -> None:
        """Give the engine's memory back that logprobs are computed in. The parameters and `publish`
        remain.
        """
        self._trainer.close()

    def _score(self, batch: ScoreBatch) -> tuple[BatchScores, list[State]]:
        """The scores, and the states of the parameters that they were computed from."""
        with self._trainer.lock:
            states = self._trainer.follow(dict(self.named_parameters()))
            scores = score_batch(self.engine, batch, self._trainer.name)
        if any(batch.routed) and (moe := self.engine.spec.moe) is not None:
            require_same_experts(batch, scores.routes, moe.layers)
        return scores, states

    @torch.no_grad()
    def _gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        """Gradients of the parameters in `values` that want one, float32, given those of the
        sequences' logprobs.
        """
        device = self.engine.model.device
        params = self._cast(values)
        wanted = {slot.param for name, slot in self._slots.items() if values[name].requires_grad}
        head = params[self._decoder.head].float()

        def compute(part: MicroBatch) -> dict[str, Tensor]:
            return self._decoder.gradients(params, head, part.to(device), temperature, wanted)

        parts = micro_batches(scored, self.micro_batch_tokens)
        totals = sum_of_parts(parts, compute, device, self.num_workers)
        return {
            name: self._part(totals, name)
            for name in self._slots
            if self._slots[name].param in wanted
        }

    def _part(self, totals: Mapping[str, Tensor], name: str) -> Tensor:
        slot = self._slots[name]
        if slot.param not in totals:  # no logprob had a gradient
            return torch.zeros(slot.shape, device=self.engine.model.device)
        return totals[slot.param].narrow(0, slot.start, slot.shape[0])

    def _cast(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The decoder's parameters as plain tensors, with the values that the engine computes
        with; of codes what they stand for.
        """
        own, products = self.engine.model, self._decoder.dtype
        params: dict[str, Tensor] = {}
        for param in self._table:
            parts = {each.name: values[each.name].detach() for each in param.sources}
            if form_of(own.params[param.name]) is not None:
                parts = {
                    name: as_held(own.params, self._slots[name], part)
                    for name, part in parts.items()
                }
            whole = next(iter(parts.values())) if len(parts) == 1 else torch.cat([*parts.values()])
            params[param.name] = (
                whole.float() if param.keep_float32 else whole.to(own.dtype).to(products)
            )
        return params


class _TrainerWeights:
    """A weight set of the engine that follows the parameters of a model."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.lock = threading.Lock()  # held while the set is written and scored under
        self._slots = slots(param_table(engine.spec))
        self._packed: list[State] = []  # the states of the parameters that were written last
        policy = engine.model
        params = allocate(
            *(param_table(policy.spec), policy.dtype, policy.device, policy.ops.allocate),
            formats_of(policy.params),
        )
        # the backward pass goes through the experts of the forward pass
        record, moe = None, policy.spec.moe
        if moe is not None:
            storage = engine.runner.storages[POLICY]
            record = RouteRecord(moe, storage.num_blocks, storage.block_size, policy.device)
        self._decoder = policy.twin(params, routes=record)
        self.name = WEIGHT_SET
        self.closed = False
        engine.shared.between_steps(POLICY, self._register)

    def follow(self, params: Mapping[str, Tensor]) -> list[State]:
        """Write the parameters into the set if any has changed; returns their states."""
        if self.closed:
            raise InvalidRequest("the policy model was closed; make a new one.")
        now = states([*params.values()])
        if now != self._packed:
            self._packed = []
            self.engine.shared.between_steps(self.name, lambda: self._write(params))
            self._packed = now
        return now

    def _register(self) -> None:
        runner, versions = self.engine.runner, self.engine.loop.sequences.versions
        taken = itertools.chain(
            [WEIGHT_SET], (f"{WEIGHT_SET}-{number}" for number in itertools.count(2))
        )
        self.name = next(name for name in taken if name not in runner.models)
        runner.models[self.name] = self._decoder
        runner.storages[self.name] = runner.storages[POLICY]
        versions[self.name] = 0

    def close(self) -> None:
        """The engine forgets the set. Once more does nothing."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self.engine.shared.between_steps(POLICY, self._unregister)

    def _unregister(self) -> None:
        version = self.engine.loop.sequences.versions.pop(self.name)
        self.engine.cache.drop_version(self.name, version)
        self.engine.runner.drop(self.name)
        self._decoder.close()

    def _write(self, params: Mapping[str, Tensor]) -> int:
        with torch.no_grad():
            for name, param in params.items():
                write(self._decoder.params, self._slots[name], param)
        return self.engine.loop.sequences.versions[self.name] + 1


def _initial_weights(engine: InferenceEngine, dtype: torch.dtype) -> dict[str, Tensor]:
    """The engine's weights by the checkpoint's names; with the checkpoint's digits where those are
    what it rounded.
    """
    spec, own = engine.spec, engine.model
    found: dict[str, Tensor] = {}
    checkpoint = load_params(engine.model_folder, spec, torch.float32, torch.device("cpu"))

    def take() -> None:
        for name, slot in slots(param_table(spec)).items():
            serving = read(own.params, slot)
            exact = read(checkpoint, slot).to(own.device)
            same = torch.equal(as_held(own.params, slot, exact), serving)
            found[name] = (exact if same else serving).to(dtype, copy=True)

    engine.shared.between_steps(POLICY, take)
    return found

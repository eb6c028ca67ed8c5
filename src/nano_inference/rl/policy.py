"""`PolicyModel`: the trainer's copy of the policy, with the engine's logprobs bit for bit."""

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nano_inference.arrays import as_torch, torch_cpu
from nano_inference.checkpoints.loading import load_params
from nano_inference.config import EngineConfig
from nano_inference.core.sequence import POLICY
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.models.parameters.param import ParamSpec
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import allocate, form_of, formats_of
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.models.routes import RouteRecord
from nano_inference.rl.backward.weights import LazyParams, Totals, Weights
from nano_inference.rl.checkpoint import (
    as_stored,
    load_masters,
    require_savable,
    save_checkpoint,
    save_masters,
)
from nano_inference.rl.divergence import Direction, TorchWeights, divergence
from nano_inference.rl.head_gradients import head_gradients
from nano_inference.rl.micro_batch import MicroBatch, ScoredSequence, micro_batches
from nano_inference.rl.parameter_states import State, states
from nano_inference.rl.scoring import (
    BatchScores,
    ScoreBatch,
    TokenIds,
    require_same_experts,
    score_batch,
)
from nano_inference.rl.scoring_module import (
    ScoringModule,
    dtype_of_products,
    place_param,
    require_chosen_codes,
    running,
    sum_of_parts,
)
from nano_inference.rl.tensors import held, numbers, torch_device, torch_dtype, write_tensors
from nano_inference.rl.torch_decoder import EndGradients
from nano_inference.weights.update import WeightUpdate

WEIGHT_SET = "trainer"


class PolicyModel(ScoringModule):
    """Ordinary parameters under the checkpoint's names, with logprobs from the engine's operations.

    Forward: the parameters, cast to the engine's dtype, score the sequences in the engine, as a
    separate weight set (`"trainer"`). Logprobs therefore equal, bit for bit, those that the engine
    reports under the same weights, and they always use the current parameters.

    Backward: a forward pass at the same cast weights is differentiated, sequence by sequence in a
    fixed order. `gradients` names the implementation: the engine's `"kernels"` for dense models and
    mixtures on the CPU and CUDA backends, otherwise `"torch"` (such as latents and Gemma 4). Every
    row passes through the experts that the engine's forward pass chose for it. The cast passes
    gradients unchanged. Quantized weights (`EngineConfig.quantization`) are used at their
    dequantized values, with inputs that are not quantized. Keys and values are rounded as the
    engine stores them (`EngineConfig.kv_cache_dtype`). Gradients pass both roundings unchanged too.

    The bits of gradients do not depend on the number of threads or on the engine's options. Those
    of `"kernels"` do not depend on the processor either, for one `EngineConfig.cpu_sums`; on CUDA,
    they depend on the GPU's architecture, and a mixture needs `EngineConfig.batch_invariant`, as
    its forward pass chooses the experts. Those of `"torch"` do if torch selects other kernels, and
    on CUDA its sums with atomics may differ between runs. On CUDA, `"kernels"` read the weights
    that scored where they are. `entropy` and `kl` are always computed in torch.

    Args:
        engine: Engine, or a configuration to build one from (`model.engine`). If several ranks
            share its model, this process also holds the whole model (`one_rank`).
        dtype: Dtype of the parameters. In float32 they start with the checkpoint's digits, as far
            as the engine still serves the checkpoint. On CUDA, parameters of the engine's dtype are
            the weight set itself, which then does not sleep with the engine's weights.
        micro_batch_tokens: Number of rows whose gradients are computed together. Limits the memory
            of a backward pass and decides the order of additions: another number changes the last
            bits.
        num_workers: Number of threads of a backward pass. The kernels share each operation, and
            torch computes as many micro-batches simultaneously. Does not affect any bit. None: the
            current number of torch's threads.
        gradient_dtype: Dtype of a backward pass's products, at the same rounded weights: float32 or
            bfloat16. None: the engine's dtype. `"torch"` then uses float32 on processors without
            native bfloat16 products, where torch's take 8 to 50 times as long.
        recompute_activations: True: a backward pass keeps only the input of each layer and computes
            the layer again for its gradient. False: it keeps the activations of all layers, in more
            memory and less time. None: True for micro-batches of more than 1,024 rows. Does not
            affect any bit.
    """

    def __init__(
        self,
        engine: InferenceEngine | EngineConfig,
        *,
        dtype: torch.dtype = torch.float32,
        micro_batch_tokens: int = 512,
        num_workers: int | None = None,
        gradient_dtype: torch.dtype | None = None,
        recompute_activations: bool | None = None,
    ) -> None:
        if not dtype.is_floating_point:
            raise ConfigError(
                f"dtype={dtype} must be a floating point dtype, such as torch.float32."
            )
        super().__init__(engine, micro_batch_tokens, num_workers, recompute_activations)
        self._table = param_table(self.scorer.spec)
        self._slots = slots(self._table)
        initial = _initial_weights(self.scorer, dtype)
        self._trainer = _TrainerWeights(self.scorer)
        for name in [*initial]:
            # popped, so that two copies of all are never held
            place_param(self, name, nn.Parameter(self._trainer.placed(name, initial.pop(name))))
        params = self.scorer.model.params  # may hold norms in float32
        self._served = {n: torch_dtype(params[slot.param].dtype) for n, slot in self._slots.items()}
        self._products = dtype_of_products(self.scorer, gradient_dtype, self.gradients)
        self._decoder = self._torch_decoder(dtype_of_products(self.scorer, gradient_dtype, "torch"))

    def _require_trainable(self) -> None:
        require_chosen_codes(self.engine, "PolicyModel")
        if self.engine.spec.state is not None:
            raise ConfigError(
                f"PolicyModel has no gradients for {self.engine.spec.architecture}, because some "
                "of its layers carry a state; the engine can serve and score it."
            )

    def entropy(
        self,
        sequences: Iterable[TokenIds],
        *,
        from_position: int | Iterable[int] = 0,
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Compute the entropy of the distribution of each token, in nats, differentiably.

        The backward pass's decoder computes it in float32 over the whole vocabulary, in chunks of
        rows. Arguments and shapes are those of `logprobs`. Raises `InvalidRequest` for temperature
        0 and for models with experts.
        """
        return divergence(self, sequences, from_position, temperature)

    def kl(
        self,
        sequences: Iterable[TokenIds],
        teacher: "PolicyModel",
        *,
        direction: Direction = "reverse",
        from_position: int | Iterable[int] = 0,
        temperature: float = 1.0,
        teacher_temperature: float = 1.0,
    ) -> list[Tensor]:
        """Compute the divergence from a teacher's distribution of each token, differentiably.

        It is computed like `entropy`. The teacher gets no gradient.

        Args:
            sequences: As in `logprobs`.
            teacher: Model with the same vocabulary, for example `PolicyModel(engine)` of another
                engine.
            direction: `"reverse"` for KL(policy || teacher), which seeks the teacher's modes, or
                `"forward"` for KL(teacher || policy), which covers them.
            from_position: As in `logprobs`.
            temperature: Temperature of the policy, above 0.
            teacher_temperature: Temperature of the teacher, above 0.

        Raises `InvalidRequest` for other values, models with experts and other vocabularies.
        """
        return divergence(
            self,
            sequences,
            from_position,
            temperature,
            teacher,
            teacher_temperature,
            direction,
        )

    def publish(self, *, blocking: bool = True, **options: Any) -> WeightUpdate:
        """Serve the parameters in the engine as a new version.

        Options are those of `engine.update_weights`.
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
        """Save the parameters as a checkpoint, with the engine's tokenizer.

        The engine and transformers can load it.

        Args:
            folder: New folder.
            dtype: Dtype of the tensors. None: the engine's dtype of each, so that an engine on the
                checkpoint has the bits of `publish`.
            masters: Also save the parameters in their own dtype (for example float32), in the
                subfolder `masters`. `load_masters` reads them, so that a run resumes without
                rounding.

        Raises `ConfigError` if the folder already holds a model, or if the model's checkpoints
        hold more than the text model's tensors.
        """
        require_savable(self.scorer.model_folder, self.scorer.spec)
        weights = {
            name: param.detach().to(dtype or self._served[name])
            for name, param in self.named_parameters()
        }
        weights = as_stored(weights, self.scorer.spec, self._table)
        named = dtype or torch_dtype(self.scorer.model.dtype)
        save_checkpoint(Path(folder), self.scorer.model_folder, weights, named)
        if masters:
            save_masters(Path(folder), dict(self.named_parameters()))

    def load_masters(self, folder: str | os.PathLike[str]) -> None:
        """Set the parameters to those of `save_pretrained(folder, masters=True)`, bit for bit.

        The engine serves them after `publish`. Raises `ConfigError` or `ModelLoadError`, with
        nothing changed, if the folder has no master weights or those of another model or dtype.
        """
        params = dict(self.named_parameters())
        saved = load_masters(Path(folder), params)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(saved[name])

    def close(self) -> None:
        """Free the engine's memory for computing logprobs.

        The parameters and `publish` remain usable.
        """
        self._trainer.close()
        super().close()

    def _score(self, batch: ScoreBatch) -> tuple[BatchScores, list[State]]:
        """Return the scores, and the parameters' states from which they were computed."""
        with self._trainer.lock:
            states = self._trainer.follow(dict(self.named_parameters()))
            scores = score_batch(self.scorer, batch, self._trainer.name)
        if any(batch.routed) and (moe := self.scorer.spec.moe) is not None:
            require_same_experts(batch, scores.routes, moe.layers)
        return scores, states

    @torch.no_grad()
    def _gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        """Return gradients, float32, of the parameters in `values` that require one.

        `scored` holds the gradients of the sequences' logprobs.
        """
        if self.gradients == "kernels":
            return self._kernel_gradients(scored, values, temperature)

        def end(weights: TorchWeights, batch: MicroBatch) -> EndGradients:
            matrix = weights.params[weights.decoder.head]

            def compute(hidden: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
                return head_gradients(
                    weights.spec, hidden, matrix, weights.head, batch, temperature, wanted
                )

            return compute

        return self.gradients_of(scored, values, end)

    def _kernel_gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        table, wanted = {param.name: param for param in self._table}, self._wanted(values)
        kernels, decoder = self._kernels(self._products), self._kernel_decoder()
        totals = Totals({name: table[name].shape for name in wanted}, kernels.device)
        lent = nullcontext() if kernels.copies_weights else self._trainer.lent(values)
        with lent as lent_params, running(kernels):

            def converted(name: str) -> Tensor:
                if lent_params is None:
                    return self._cast_one(table[name], values, self._products)
                whole = numbers(lent_params[name])
                return whole.float() if table[name].keep_float32 else whole.to(self._products)

            weights = Weights(kernels, LazyParams(table, converted))
            for batch in micro_batches(scored, self.micro_batch_tokens):
                decoder.add_gradients(weights, batch, temperature, totals)
        return {
            name: whole.narrow(0, slot.start, slot.shape[0])
            for name, slot in self._slots.items()
            if (whole := totals.total(slot.param)) is not None
        }

    @torch.no_grad()
    def gradients_of(
        self,
        scored: Iterable[ScoredSequence],
        values: Mapping[str, Tensor],
        end: Callable[[TorchWeights, MicroBatch], EndGradients],
    ) -> dict[str, Tensor]:
        """Return gradients, float32, of the parameters in `values` that require one.

        `end` returns the function that differentiates the hidden rows of a micro-batch of `scored`.
        """
        device = torch_device(self.scorer.model.device)
        weights = self.weights(values)
        wanted = self._wanted(values)

        def compute(part: MicroBatch) -> dict[str, Tensor]:
            batch = part.to(device)
            return self._decoder.gradients(weights.params, end(weights, batch), batch, wanted)

        parts = micro_batches(scored, self.micro_batch_tokens)
        totals = sum_of_parts(parts, compute, device, self.num_workers)
        return {
            name: self._part(totals, name)
            for name in self._slots
            if self._slots[name].param in wanted
        }

    def _wanted(self, values: Mapping[str, Tensor]) -> set[str]:
        """Return the decoder's parameters that hold one with a gradient."""
        return {slot.param for name, slot in self._slots.items() if values[name].requires_grad}

    def _part(self, totals: Mapping[str, Tensor], name: str) -> Tensor:
        slot = self._slots[name]
        if slot.param not in totals:  # all gradients of logprobs were 0
            return torch.zeros(slot.shape, device=torch_device(self.scorer.model.device))
        return totals[slot.param].narrow(0, slot.start, slot.shape[0])

    def weights(self, values: Mapping[str, Tensor]) -> TorchWeights:
        """Return the decoder of the backward pass with these parameters."""
        params = self._cast(values)
        head = params[self._decoder.head].float()
        return TorchWeights(self.scorer.spec, self._decoder, params, head)

    def _cast(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the decoder's parameters as plain tensors with the engine's values."""
        products = self._decoder.dtype
        return {param.name: self._cast_one(param, values, products) for param in self._table}

    def _cast_one(
        self, param: ParamSpec, values: Mapping[str, Tensor], products: torch.dtype
    ) -> Tensor:
        """Return a parameter as a plain tensor with the engine's values, dequantized."""
        model = self.scorer.model
        parts = {each.name: values[each.name].detach() for each in param.sources}
        if form_of(model.params[param.name]) is not None:
            parts = {
                name: held(model.params, self._slots[name], part) for name, part in parts.items()
            }
        whole = next(iter(parts.values())) if len(parts) == 1 else torch.cat([*parts.values()])
        if param.keep_float32:
            return whole.float()
        return whole.to(torch_dtype(model.dtype)).to(products)


class _TrainerWeights:
    """A weight set of the engine that follows the parameters of a model."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.lock = threading.Lock()  # held while the set is written and used for scoring
        self._slots = slots(param_table(engine.spec))
        self._packed: list[State] = []  # states of the parameters when last written
        policy = engine.model
        params = allocate(
            *(param_table(policy.spec), policy.dtype, policy.device, policy.ops.allocate),
            formats_of(policy.params),
        )
        # the backward pass uses the experts of the forward pass
        record, moe = None, policy.spec.moe
        if moe is not None:
            storage = engine.runner.storages[POLICY]
            record = RouteRecord(moe, storage.num_blocks, storage.block_size, policy.device)
        self._decoder = policy.twin(params, routes=record)
        self.name = WEIGHT_SET
        self.closed = False
        engine.shared.between_steps(POLICY, self._register)

    def placed(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter's memory with its value: the set's on a GPU, for equal dtypes."""
        memory = self._memory(name)
        if memory is None or (memory.dtype, memory.shape) != (value.dtype, value.shape):
            return value
        self.engine.runner.awake.add(self.name)
        return memory.copy_(value)

    def _memory(self, name: str) -> Tensor | None:
        """Return the set's memory of a parameter, if a trainer can use it: not if it is packed."""
        slot = self._slots[name]
        param = self._decoder.params[slot.param]
        if self._decoder.ops.name != "cuda" or not isinstance(param, Tensor):
            return None
        # `data` has its own version counter: it does not count writes to other parts
        return param.narrow(0, slot.start, slot.local_shape[0]).data

    def _is_placed(self, name: str, value: Tensor) -> bool:
        memory = self._memory(name)
        return memory is not None and (memory.data_ptr(), memory.dtype, memory.stride()) == (
            *(value.data_ptr(), value.dtype, value.stride()),
        )

    def follow(self, params: Mapping[str, Tensor]) -> list[State]:
        """Write the parameters into the set if any has changed, and return their states."""
        if self.closed:
            raise InvalidRequest("the policy model was closed; create a new one.")
        now = states([*params.values()])
        if now != self._packed:
            self._packed = []
            self.engine.shared.between_steps(self.name, lambda: self._write(params))
            self._packed = now
        return now

    @contextmanager
    def lent(self, params: Mapping[str, Tensor]) -> Iterator[Mapping[str, Any] | None]:
        """Lend the set, with the values of `params`, to a backward pass. None: it is closed or
        asleep.

        Raises `RuntimeError` at the end if the engine's weights were put to sleep meanwhile.
        """
        life = self.engine.shared.life
        with self.lock:
            if self.closed or not life.has_weights:
                yield None
                return
            self.follow(params)
            yield self._decoder.params
            if not life.has_weights and self.name not in self.engine.runner.awake:
                raise RuntimeError(
                    "the engine's weights were put to sleep during backward; do it before or after."
                )

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
        """Remove the set from the engine, once."""
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
        others = {name: value for name, value in params.items() if not self._is_placed(name, value)}
        write_tensors(self._decoder.params, self._slots, others)
        return self.engine.loop.sequences.versions[self.name] + 1


def _initial_weights(engine: InferenceEngine, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the engine's weights by checkpoint name.

    Weights that the engine rounded from the checkpoint get the checkpoint's digits.
    """
    spec, model = engine.spec, engine.model
    initial: dict[str, Tensor] = {}
    checkpoint = load_params(engine.model_folder, spec, torch.float32, torch_cpu())

    def take() -> None:
        for name, slot in slots(param_table(spec)).items():
            serving = as_torch(read(model.params, slot))
            exact = read(checkpoint, slot).to(serving.device)
            same = torch.equal(held(model.params, slot, exact), serving)
            initial[name] = (exact if same else serving).to(dtype, copy=True)

    engine.shared.between_steps(POLICY, take)
    return initial

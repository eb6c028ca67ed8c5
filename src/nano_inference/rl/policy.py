"""`PolicyModel`: the trainer's copy of the policy, whose logprobs are the engine's to the bit."""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nano_inference.checkpoints.loading import cpu_multiplies_bf16, load_params
from nano_inference.config import EngineConfig, require_count, with_plain_weights
from nano_inference.core.sequence import POLICY
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.storage import allocate, form_of, formats_of
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import as_held, read, write
from nano_inference.models.routes import RouteRecord
from nano_inference.ranks.build import require_one_rank
from nano_inference.rl.checkpoint import (
    as_stored,
    load_masters,
    require_savable,
    save_checkpoint,
    save_masters,
)
from nano_inference.rl.micro_batch import MicroBatch, ScoredSequence, micro_batches
from nano_inference.rl.parameter_states import State, states
from nano_inference.rl.scoring import (
    BatchScores,
    Grammars,
    Routed,
    ScoreBatch,
    Targets,
    TokenIds,
    check_batch,
    require_same_experts,
    score_batch,
)
from nano_inference.rl.torch_decoder import TorchDecoder
from nano_inference.weights.update import WeightUpdate

WEIGHT_SET = "trainer"


class ScoringModule(nn.Module):
    """Parameters whose logprobs the engine computes, and their gradients by `_gradients`.

    Args:
        engine: an engine on one rank, or the configuration to build one from.
        micro_batch_tokens: see `PolicyModel`.
        num_workers: as there.
    """

    def __init__(
        self,
        engine: InferenceEngine | EngineConfig,
        micro_batch_tokens: int,
        num_workers: int | None,
    ) -> None:
        super().__init__()
        require_count("micro_batch_tokens", micro_batch_tokens)
        if num_workers is not None:
            require_count("num_workers", num_workers)
        self.engine = (
            engine
            if isinstance(engine, InferenceEngine)
            else InferenceEngine(with_plain_weights(engine))
        )
        require_one_rank(self.engine.runner, type(self).__name__)
        self.micro_batch_tokens, self.num_workers = micro_batch_tokens, num_workers

    def _torch_decoder(self, gradient_dtype: torch.dtype | None) -> TorchDecoder:
        """For the backward pass. Raises `ConfigError` for a dtype that it does not multiply in."""
        own, products = self.engine.model, dtype_of_products(self.engine, gradient_dtype)
        kept = self.engine.runner.storage.format
        return TorchDecoder(own.spec, own.ropes, own.embed_scale, products, kept)

    def forward(
        self,
        sequences: Iterable[TokenIds],
        *,
        from_position: int | Iterable[int] = 0,
        temperature: float = 1.0,
        grammar: Grammars = None,
        routed_experts: Routed = None,
        targets: Targets = None,
    ) -> list[Tensor]:
        """See `logprobs`."""
        return self.logprobs(
            sequences,
            from_position=from_position,
            temperature=temperature,
            grammar=grammar,
            routed_experts=routed_experts,
            targets=targets,
        )

    def logprobs(
        self,
        sequences: Iterable[TokenIds],
        *,
        from_position: int | Iterable[int] = 0,
        temperature: float = 1.0,
        grammar: Grammars = None,
        routed_experts: Routed = None,
        targets: Targets = None,
    ) -> list[Tensor]:
        """Log-probability of each token given those before it, under the parameters;
        differentiable.

        Arguments, results and errors are those of `score`. `routed_experts` of samples, one (or
        None) a sequence, are checked: the model goes through its own choices, which are the
        engine's to the bit under the same weights, and raises `InvalidRequest` that names the first
        token and layer where those differ. Parameters must not change before
        `backward`, which raises torch's error if they did. Entries of gradient 0 cost nothing in
        it, nor do sequences of nothing else.
        """
        batch = check_batch(
            self.engine, sequences, from_position, temperature, grammar, routed_experts, targets
        )
        params = dict(self.named_parameters())
        if torch.is_grad_enabled() and any(param.requires_grad for param in params.values()):
            flat: Tensor = _Logprobs.apply(self, batch, *params.values())  # pyright: ignore
            lengths = [batch.num_logprobs(index) for index in range(len(batch.token_ids))]
            ends = itertools.accumulate(lengths)
            return [
                batch.shaped(index, flat[end - length : end])
                for index, (length, end) in enumerate(zip(lengths, ends, strict=True))
            ]
        return self._score(batch)[0].logprobs

    def _score(self, batch: ScoreBatch) -> tuple[BatchScores, list[State]]:
        """The scores, and the states of the parameters that they were computed from."""
        raise NotImplementedError

    def _base_version(self) -> int | None:
        """The version of the engine's weights that a gradient reads too; None: it reads none."""
        return None

    def _gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        """Gradients of the parameters in `values` that want one, float32, given those of the
        sequences' logprobs.
        """
        raise NotImplementedError


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


class _Logprobs(torch.autograd.Function):
    """All logprobs of a batch in a row, as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, model: ScoringModule, batch: ScoreBatch, *params: Tensor) -> Tensor:
        ctx.model, ctx.batch, ctx.base = model, batch, model._base_version()
        ctx.save_for_backward(*params)
        scores, ctx.states = model._score(batch)
        ctx.routes = scores.routes
        return torch.cat([torch.empty(0), *(each.flatten() for each in scores.logprobs)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        names = [name for name, _ in ctx.model.named_parameters()]
        # torch's own check is of version counters
        values = dict(zip(names, ctx.saved_tensors, strict=True))
        if states(ctx.saved_tensors) != ctx.states:
            raise RuntimeError(
                "a parameter was modified between logprobs and backward; call backward before it "
                "changes."
            )
        _require_base(ctx)
        scored = _scored(ctx.batch, grads[0], ctx.routes)
        found = ctx.model._gradients(scored, values, ctx.batch.temperature)
        _require_base(ctx)  # nor meanwhile, by another thread
        return (
            None,
            None,
            *(
                found[name].to(values[name].dtype) if values[name].requires_grad else None
                for name in names
            ),
        )


def _require_base(ctx: Any) -> None:
    if ctx.model._base_version() != ctx.base:
        raise RuntimeError(
            "the engine's weights, which the adapter is of, were updated or put to sleep between "
            "logprobs and backward; call backward before."
        )


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
        self._decoder = policy.twin(params)
        # the backward pass goes through the experts of the forward pass
        if policy.spec.moe is not None:
            storage = engine.runner.storages[POLICY]
            self._decoder.routes = RouteRecord(
                policy.spec.moe, storage.num_blocks, storage.block_size, policy.device
            )
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


def require_chosen_codes(engine: InferenceEngine, what: str) -> None:
    """Raise `ConfigError` where `quantization="auto"` put the weights into the blocks of their
    file: a trainer's weights would be rounded to such blocks, and no setting has asked for that.
    """
    if engine.in_blocks_by_default:
        raise ConfigError(
            f"{what} needs plain weights, and this engine computes the blocks of its .gguf file, "
            "which is the default on a CPU; build it with quantization=None, or with "
            f"quantization={engine.config.codes!r} to train weights that are rounded to blocks."
        )


def dtype_of_products(engine: InferenceEngine, asked: torch.dtype | None) -> torch.dtype:
    """What a backward pass multiplies in; see `PolicyModel`. Raises `ConfigError`."""
    if asked not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(f"gradient_dtype={asked} must be torch.float32, torch.bfloat16 or None.")
    own = engine.model
    native = own.device.type != "cpu" or cpu_multiplies_bf16()
    return asked or (torch.bfloat16 if own.dtype == torch.bfloat16 and native else torch.float32)


def sum_of_parts(
    parts: Iterable[MicroBatch],
    compute: Callable[[MicroBatch], dict[str, Tensor]],
    device: torch.device,
    num_workers: int | None,
) -> dict[str, Tensor]:
    """The gradients of micro-batches, added up in their order, however many are computed at
    once.
    """
    workers = (num_workers or torch.get_num_threads()) if device.type == "cpu" else 1
    totals: dict[str, Tensor] = {}
    with _single_threaded(workers) as pool:
        running: deque[Future[dict[str, Tensor]]] = deque()
        # the last ones only wait
        for part in itertools.chain(parts, itertools.repeat(None, workers)):
            if len(running) == workers or (part is None and running):
                _add(totals, running.popleft().result())
            if part is not None:
                running.append(pool.submit(compute, part))
    return totals


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


def place_param(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Register a parameter under a dotted name, with modules that do nothing on the way there."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, param)


def _scored(
    batch: ScoreBatch, grad: Tensor, routes: Iterable[Tensor | None]
) -> Iterator[ScoredSequence]:
    """Each sequence with its routes and its part of the gradient, which is of all logprobs in a
    row.

    The entry of a first token is constant.
    """
    values, at = grad.float().tolist(), 0
    for index, (token_ids, position, routed) in enumerate(
        zip(batch.token_ids, batch.positions, routes, strict=True)
    ):
        start, end = max(position, 1), at + batch.num_logprobs(index)
        first = at + (start - position) * batch.width(index)
        masks, targets = batch.masks[index], batch.targets[index]
        yield ScoredSequence(
            token_ids,
            start,
            values[first:end],
            routed,
            masks.words if masks is not None else (),
            targets.rows if targets is not None else (),
        )
        at = end


def _add(totals: dict[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    for name, grad in grads.items():
        if name in totals:
            totals[name] += grad
        else:
            totals[name] = grad.float()


@contextmanager
def _single_threaded(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose torch operations run on one thread each: a product split between threads has
    other bits.
    """
    before = torch.get_num_threads()
    pinned = threading.Barrier(workers + 1)

    def pin() -> None:
        torch.get_num_threads()  # else it would take the process's number later, when it first asks
        torch.set_num_threads(1)
        pinned.wait()

    with ThreadPoolExecutor(workers, thread_name_prefix="nano-inference-gradients") as pool:
        for _ in range(workers):
            pool.submit(pin)
        pinned.wait()
        torch.set_num_threads(before)  # of threads that are still to come too
        yield pool

"""`ScoringModule`: parameters whose logprobs the engine computes, with gradients."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nano_inference.arrays import has_dtype
from nano_inference.checkpoints.loading import cpu_multiplies_bf16
from nano_inference.config import EngineConfig, require_count, with_plain_weights
from nano_inference.device.queues import queue_of
from nano_inference.engine.engine import InferenceEngine
from nano_inference.errors import ConfigError
from nano_inference.models.rope import Rotation
from nano_inference.ops.gradients import GradientOps
from nano_inference.ops.kv_codes import KvFormat
from nano_inference.rl.activations import require_choice
from nano_inference.rl.backward.coverage import Gradients, gradients_of
from nano_inference.rl.backward.decoder import KernelDecoder
from nano_inference.rl.backward.kernels import KERNELS
from nano_inference.rl.micro_batch import ScoredSequence
from nano_inference.rl.parameter_states import State, states
from nano_inference.rl.ranks import scorer_of
from nano_inference.rl.scoring import (
    BatchScores,
    Grammars,
    Routed,
    ScoreBatch,
    Targets,
    TokenIds,
    check_batch,
)
from nano_inference.rl.tensors import rotation, torch_device, torch_dtype
from nano_inference.rl.torch_decoder import TorchDecoder

P = TypeVar("P")


class ScoringModule(nn.Module):
    """Parameters whose logprobs the engine computes, with gradients from `_gradients`.

    Args:
        engine: Engine, or a configuration to build one from.
        micro_batch_tokens: As in `PolicyModel`.
        num_workers: As in `PolicyModel`.
        recompute_activations: As in `PolicyModel`.

    Attributes:
        engine: Engine that serves the parameters.
        scorer: Engine that computes logprobs: `engine`, or one of one rank with its bits if several
            ranks share the model.
    """

    def __init__(
        self,
        engine: InferenceEngine | EngineConfig,
        micro_batch_tokens: int,
        num_workers: int | None,
        recompute_activations: bool | None,
    ) -> None:
        super().__init__()
        require_count("micro_batch_tokens", micro_batch_tokens)
        if num_workers is not None:
            require_count("num_workers", num_workers)
        require_choice(recompute_activations)
        self.engine = (
            engine
            if isinstance(engine, InferenceEngine)
            else InferenceEngine(with_plain_weights(engine))
        )
        self._require_trainable()
        self.scorer = scorer_of(self.engine)
        self.micro_batch_tokens, self.num_workers = micro_batch_tokens, num_workers
        self._recompute = recompute_activations

    def _require_trainable(self) -> None:
        """Raise `ConfigError` if this class cannot train the engine's model."""

    def close(self) -> None:
        """Free the memory for computing logprobs.

        The parameters and `publish` remain usable.
        """
        if self.scorer is not self.engine:
            self.scorer.shutdown()

    @property
    def gradients(self) -> Gradients:
        """Implementation of the gradients of logprobs: `"kernels"` or `"torch"`."""
        return gradients_of(self.scorer.spec, self.scorer.model.ops.name)

    def _torch_decoder(self, products: torch.dtype) -> TorchDecoder:
        """Return the model for a backward pass in torch."""
        model = self.scorer.model
        return TorchDecoder(
            *(model.spec, self._ropes(), model.embed_scale, products, self._kept()),
            self._recompute,
        )

    def _kernel_decoder(self) -> KernelDecoder:
        """Return the model for a backward pass by the kernels."""
        model = self.scorer.model
        return KernelDecoder(
            *(model.spec, self._ropes(), model.embed_scale, self._kept()),
            self._recompute,
        )

    def _kernels(self, dtype: torch.dtype) -> GradientOps:
        """Return the kernels of the engine's backend, for products of this dtype."""
        model, threads = self.scorer.model, self.num_workers or torch.get_num_threads()
        return KERNELS[model.ops.name](model, dtype, threads)

    def _ropes(self) -> list[Rotation]:
        return [rotation(rope) for rope in self.scorer.model.ropes]

    def _kept(self) -> KvFormat:
        kept = self.scorer.runner.storage.format
        return replace(kept, dtype=torch_dtype(kept.dtype))

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
        """Compute the logprob of each token given the previous ones, differentiably.

        Arguments, results and errors are those of `score`, under these parameters.
        `routed_experts` of samples, one (or None) for each sequence, are checked: the model makes
        its own choices, which equal the engine's bit for bit under the same weights. If choices
        differ, `InvalidRequest` names the first such token and layer.

        Do not change parameters before `backward`, which raises `RuntimeError` if you do. Entries
        with gradient 0 add no cost to `backward`. Sequences with only such entries are skipped.
        """
        batch = check_batch(
            self.scorer, sequences, from_position, temperature, grammar, routed_experts, targets
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

    forward = logprobs

    def _score(self, batch: ScoreBatch) -> tuple[BatchScores, list[State]]:
        """Return the scores, and the parameters' states from which they were computed."""
        raise NotImplementedError

    def _base_version(self) -> int | None:
        """Return the engine's weight version that a gradient depends on, or None."""
        return None

    def _gradients(
        self, scored: Iterable[ScoredSequence], values: Mapping[str, Tensor], temperature: float
    ) -> dict[str, Tensor]:
        """Return gradients, float32, of the parameters in `values` that require one.

        `scored` holds the gradients of the sequences' logprobs.
        """
        raise NotImplementedError


class _Logprobs(torch.autograd.Function):
    """Concatenated logprobs of a batch as a function of the parameters."""

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
        # torch's own check compares only version counters
        values = dict(zip(names, ctx.saved_tensors, strict=True))
        if states(ctx.saved_tensors) != ctx.states:
            raise RuntimeError(
                "a parameter was modified between logprobs and backward; call backward before you "
                "change parameters."
            )
        _require_base(ctx)
        scored = _scored(ctx.batch, grads[0], ctx.routes)
        gradients = ctx.model._gradients(scored, values, ctx.batch.temperature)
        _require_base(ctx)  # again, in case another thread changed it meanwhile
        return (
            None,
            None,
            *(
                # popped, so that gradients in both dtypes are never held whole
                gradients.pop(name).to(values[name].dtype) if values[name].requires_grad else None
                for name in names
            ),
        )


def _require_base(ctx: Any) -> None:
    if ctx.model._base_version() != ctx.base:
        raise RuntimeError(
            "the engine's weights under the adapter were updated or put to sleep between logprobs "
            "and backward; call backward before that."
        )


def require_chosen_codes(engine: InferenceEngine, what: str) -> None:
    """Raise `ConfigError` if `quantization="auto"` chose the quantized blocks of a file.

    A trainer's weights would be rounded to such blocks although no setting requests it.
    """
    if engine.in_blocks_by_default:
        raise ConfigError(
            f"{what} needs plain weights, but this engine computes with the blocks of its .gguf "
            "file, the default on a CPU; build it with quantization=None, or with "
            f"quantization={engine.config.codes!r} to train weights rounded to blocks."
        )


def dtype_of_products(
    engine: InferenceEngine, asked: torch.dtype | None, gradients: Gradients
) -> torch.dtype:
    """Return the dtype of a backward pass's products, as `PolicyModel` documents it.

    Raises `ConfigError`.
    """
    if asked not in (None, torch.float32, torch.bfloat16):
        raise ConfigError(f"gradient_dtype={asked} must be torch.float32, torch.bfloat16 or None.")
    model = engine.model
    native = gradients == "kernels" or model.device.type != "cpu" or cpu_multiplies_bf16()
    narrow = has_dtype(model, "bfloat16") and native
    return asked or (torch.bfloat16 if narrow else torch.float32)


def sum_of_parts(
    parts: Iterable[P],
    compute: Callable[[P], dict[str, Tensor]],
    device: torch.device,
    num_workers: int | None,
) -> dict[str, Tensor]:
    """Return the sum of the micro-batches' gradients, added in their order.

    The sum does not depend on the number of workers.
    """
    workers = (num_workers or torch.get_num_threads()) if device.type == "cpu" else 1
    totals: dict[str, Tensor] = {}
    with _single_threaded(workers) as pool:
        running: deque[Future[dict[str, Tensor]]] = deque()
        # the final None items only drain the running parts
        for part in itertools.chain(parts, itertools.repeat(None, workers)):
            if len(running) == workers or (part is None and running):
                _add(totals, running.popleft().result())
            if part is not None:
                running.append(pool.submit(compute, part))
    return totals


@contextmanager
def running(kernels: GradientOps) -> Iterator[None]:
    """Launch kernels on their device, and run torch's operations on the calling thread only.

    Between kernels, threads of torch that wait for their next operation would spin on the cores
    that the kernels need: a backward pass would take twice as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with queue_of(torch_device(kernels.device)).current():
            yield
    finally:
        torch.set_num_threads(before)


def place_param(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Register a parameter under a dotted name, with empty modules along the path."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, param)


def _scored(
    batch: ScoreBatch, grad: Tensor, routes: Iterable[Tensor | None]
) -> Iterator[ScoredSequence]:
    """Yield each sequence with its routes and its part of the gradient of all logprobs.

    The entry of a sequence's first token is constant and skipped.
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
    """Yield threads that run torch operations single-threaded.

    Products split between threads have other bits.
    """
    before = torch.get_num_threads()
    pinned = threading.Barrier(workers + 1)

    def pin() -> None:
        torch.get_num_threads()  # the first call would overwrite the number set below
        torch.set_num_threads(1)
        pinned.wait()

    with ThreadPoolExecutor(workers, thread_name_prefix="nano-inference-gradients") as pool:
        for _ in range(workers):
            pool.submit(pin)
        pinned.wait()
        torch.set_num_threads(before)  # restores it for threads that start later too
        yield pool

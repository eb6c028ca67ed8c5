"""Entropy of a policy and its KL divergence from a teacher, over the whole vocabulary, with
gradients.

A trainer's own pass in torch computes both the values and the gradients, at the weights that the
engine serves after `publish`. Logits are in memory only for `ROWS` rows at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nano_inference.errors import InvalidRequest
from nano_inference.models.spec.model import ModelSpec
from nano_inference.rl.micro_batch import MicroBatch, ScoredSequence, micro_batches
from nano_inference.rl.parameter_states import states
from nano_inference.rl.scoring import TokenIds, check_batch
from nano_inference.rl.scoring_module import sum_of_parts
from nano_inference.rl.tensors import torch_device
from nano_inference.rl.torch_decoder import EndGradients, TorchDecoder
from nano_inference.sampling.scaling import scaled

ROWS = 64  # rows whose logits are in memory simultaneously

# reverse: KL(policy || teacher); forward: KL(teacher || policy)
Direction = Literal["reverse", "forward"]
DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")


class TorchWeights(NamedTuple):
    """A model's decoder with its weights in plain tensors."""

    spec: ModelSpec
    decoder: TorchDecoder
    params: Mapping[str, Tensor]
    head: Tensor  # float32 [V, H]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the rows after the last norm, [N, H]."""
        embedded = functional.embedding(batch.token_ids, self.params["embed"]).float()
        return self.decoder.hidden(self.params, embedded * self.decoder.embed_scale, batch)


class Distributed(Protocol):
    """A model of which divergences can be computed: `PolicyModel`."""

    scorer: Any
    micro_batch_tokens: int
    num_workers: int | None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name."""
        ...

    def weights(self, values: Mapping[str, Tensor]) -> TorchWeights:
        """Return the decoder with these parameters, cast to the engine's dtype."""
        ...

    def gradients_of(
        self,
        scored: Iterable[ScoredSequence],
        values: Mapping[str, Tensor],
        end: Callable[[TorchWeights, MicroBatch], EndGradients],
    ) -> dict[str, Tensor]:
        """Return gradients of the parameters, given those of the hidden rows."""
        ...


class Asked(NamedTuple):
    """A divergence to compute.

    Attributes:
        sequences: Token ids.
        positions: First position of each sequence whose distribution counts.
        temperature: Temperature of the policy, above 0.
        teacher: The teacher. None: the policy's entropy.
        teacher_temperature: Temperature of the teacher, above 0.
        direction: Direction of the divergence.
    """

    sequences: list[list[int]]
    positions: list[int]
    temperature: float
    teacher: Distributed | None
    teacher_temperature: float
    direction: Direction


def divergence(
    model: Distributed,
    sequences: Iterable[TokenIds],
    from_position: int | Iterable[int],
    temperature: float,
    teacher: Distributed | None = None,
    teacher_temperature: float = 1.0,
    direction: Direction = "reverse",
) -> list[Tensor]:
    """Return the policy's entropy at each position, or its divergence from a teacher.

    `PolicyModel.entropy` and `PolicyModel.kl` document the arguments and errors.
    """
    batch = check_batch(model.scorer, sequences, from_position, temperature)
    if temperature == 0 or teacher_temperature == 0:
        raise InvalidRequest("temperature must be above 0: a greedy distribution has no gradient.")
    for policy in (model, teacher):
        if policy is not None and policy.scorer.spec.moe is not None:
            raise InvalidRequest(
                f"{policy.scorer.spec.architecture} has experts, whose choices only the engine "
                "knows; use logprobs(targets=...) of some tokens instead."
            )
    if teacher is not None:
        require_comparable(model, teacher, direction)
        check_batch(teacher.scorer, batch.token_ids, batch.positions, teacher_temperature)
    asked = Asked(
        batch.token_ids,
        batch.positions,
        batch.temperature,
        teacher,
        teacher_temperature,
        direction,
    )
    params = dict(model.named_parameters())
    flat: Tensor = _Divergence.apply(model, asked, *params.values())  # pyright: ignore
    lengths = [len(ids) - at for ids, at in zip(asked.sequences, asked.positions, strict=True)]
    return list(flat.split(lengths))


def require_comparable(model: Distributed, teacher: Distributed, direction: Any) -> None:
    """Raise `InvalidRequest` unless both models have the same vocabulary."""
    ours, theirs = model.scorer.spec.vocab_size, teacher.scorer.spec.vocab_size
    if ours != theirs:
        raise InvalidRequest(
            f"the teacher's vocabulary has {theirs} tokens, the policy's {ours}; use a teacher "
            "with the policy's tokenizer."
        )
    if direction not in DIRECTIONS:
        raise InvalidRequest(f"direction={direction!r} must be one of {', '.join(DIRECTIONS)}.")


def terms(logprobs: Tensor, teacher: Tensor | None, direction: Direction) -> tuple[Tensor, Tensor]:
    """Return a divergence of each row, and its gradient with respect to the row's logits.

    Args:
        logprobs: Log-probabilities of the policy, [R, V].
        teacher: Log-probabilities of the teacher, [R, V]. None: the policy's entropy.
        direction: Direction of the divergence.
    """
    odds = logprobs.exp()
    if teacher is not None and direction == "forward":
        targets = teacher.exp()
        # a token that the teacher never draws adds nothing
        distance = torch.where(targets > 0, teacher - logprobs, 0)
        return (targets * distance).sum(dim=-1), odds - targets
    distance = logprobs if teacher is None else logprobs - teacher
    distance = torch.where(odds > 0, distance, 0)
    value = (odds * distance).sum(dim=-1)
    gradient = odds * (distance - value[:, None])
    return (-value, -gradient) if teacher is None else (value, gradient)


def _logprobs(
    weights: TorchWeights, rows: Tensor, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities after some rows [R, H], and the slope of a cap of logits."""
    logits = scaled(functional.linear(rows.float(), weights.head), weights.spec.logit_scale)
    cap = weights.spec.logits_cap
    slope = 1 - (logits / cap).square() if cap else None
    return torch.log_softmax(logits.div_(temperature), dim=-1), slope


def _chunks(batch: MicroBatch) -> Iterator[slice]:
    for first in range(0, len(batch.scored_rows), ROWS):
        yield slice(first, first + ROWS)


def _of_teacher(asked: Asked, teacher: TorchWeights | None, hidden: Tensor | None) -> Tensor | None:
    if teacher is None or hidden is None:
        return None
    return _logprobs(teacher, hidden, asked.teacher_temperature)[0]


def _values(
    asked: Asked, weights: TorchWeights, teacher: TorchWeights | None, batch: MicroBatch
) -> Tensor:
    hidden = weights.hidden(batch)[batch.scored_rows]
    other = None if teacher is None else teacher.hidden(batch)[batch.scored_rows]
    parts: list[Tensor] = []
    for rows in _chunks(batch):
        log_probs, _ = _logprobs(weights, hidden[rows], asked.temperature)
        theirs = _of_teacher(asked, teacher, None if other is None else other[rows])
        parts.append(terms(log_probs, theirs, asked.direction)[0])
    return torch.cat(parts)


def _end_gradients(
    asked: Asked, weights: TorchWeights, teacher: TorchWeights | None, batch: MicroBatch
) -> EndGradients:
    """Return the function that differentiates the rows' divergences."""
    with torch.no_grad():
        other = None if teacher is None else teacher.hidden(batch)[batch.scored_rows]
    sums = torch.zeros(len(batch.scored_rows), device=batch.gradients.device).index_add_(
        0, batch.owners, batch.gradients
    )
    matrix = weights.params[weights.decoder.head]
    divisor = weights.spec.logit_scale.divisor * asked.temperature

    def compute(hidden: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        d_hidden = torch.zeros_like(hidden)
        d_head = torch.zeros_like(weights.head) if wanted else torch.empty(0)
        for rows in _chunks(batch):
            places = batch.scored_rows[rows]
            log_probs, slope = _logprobs(weights, hidden[places], asked.temperature)
            theirs = _of_teacher(asked, teacher, None if other is None else other[rows])
            _, d_logits = terms(log_probs, theirs, asked.direction)
            d_logits.mul_(sums[rows, None] / divisor)
            d_logits = (d_logits if slope is None else d_logits.mul_(slope)).to(hidden.dtype)
            d_hidden.index_add_(0, places, d_logits @ matrix)
            if wanted:
                d_head += d_logits.T @ hidden[places]
        return d_hidden, d_head

    return compute


class _Divergence(torch.autograd.Function):
    """Concatenated divergences of a batch as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, model: Distributed, asked: Asked, *params: Tensor) -> Tensor:
        ctx.model, ctx.asked, ctx.states = model, asked, states(params)
        ctx.save_for_backward(*params)
        names = [name for name, _ in model.named_parameters()]
        weights = model.weights(dict(zip(names, params, strict=True)))
        teacher = _weights_of(asked.teacher)
        device = torch_device(model.scorer.model.device)

        def compute(part: tuple[int, MicroBatch]) -> dict[str, Tensor]:
            with torch.no_grad():  # the pool's threads do not inherit it
                index, batch = part
                return {str(index): _values(asked, weights, teacher, batch.to(device)).cpu()}

        values = sum_of_parts(_parts(asked), compute, device, model.num_workers)
        rows: list[Tensor] = [torch.empty(0)]
        for index, position in enumerate(asked.positions):
            rows.append(torch.full((int(position == 0),), torch.nan))
            rows.append(values.get(str(index), torch.empty(0)))
        return torch.cat(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        model, asked = ctx.model, ctx.asked
        names = [name for name, _ in model.named_parameters()]
        values = dict(zip(names, ctx.saved_tensors, strict=True))
        if states(ctx.saved_tensors) != ctx.states:
            raise RuntimeError(
                "a parameter was modified before backward; call backward before you change "
                "parameters."
            )
        teacher = _weights_of(asked.teacher)

        def end(weights: TorchWeights, batch: MicroBatch) -> EndGradients:
            return _end_gradients(asked, weights, teacher, batch)

        gradients = model.gradients_of(_scored(asked, grads[0]), values, end)
        return (
            None,
            None,
            *(
                gradients[name].to(values[name].dtype) if values[name].requires_grad else None
                for name in names
            ),
        )


def _weights_of(teacher: Distributed | None) -> TorchWeights | None:
    return None if teacher is None else teacher.weights(dict(teacher.named_parameters()))


def _parts(asked: Asked) -> Iterator[tuple[int, MicroBatch]]:
    """Yield each sequence that has distributions, as one micro-batch with all of them."""
    for index, (ids, position) in enumerate(zip(asked.sequences, asked.positions, strict=True)):
        start = max(position, 1)
        if start < len(ids):
            scored = ScoredSequence(ids, start, [1.0] * (len(ids) - start))
            yield index, next(micro_batches([scored], len(ids)))


def _scored(asked: Asked, grad: Tensor) -> Iterator[ScoredSequence]:
    """Yield each sequence with the gradients of its divergences."""
    values, at = grad.float().tolist(), 0
    for ids, position in zip(asked.sequences, asked.positions, strict=True):
        start, end = max(position, 1), at + len(ids) - position
        yield ScoredSequence(ids, start, values[at + start - position : end])
        at = end

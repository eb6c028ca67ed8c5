"""`HeadTrainer`: training of a head that drafts from the policy's own rows."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from nano_inference.arrays import as_torch
from nano_inference.core.sequence import POLICY
from nano_inference.device.kv_tensors import KVStorage
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.requests import checked_ids
from nano_inference.errors import ConfigError, InvalidRequest
from nano_inference.models.taps import Taps
from nano_inference.ops.batches import Rows, batch_of_rows
from nano_inference.rl.draft_modules import PolicyRows
from nano_inference.rl.tensors import numbers
from nano_inference.sampling.scaling import scaled
from nano_inference.types import TrainingSample

DECAY = 0.8  # factor of the loss at each further depth
MOST_ROWS = 256  # tokens of a sample at which agreement is measured
BLOCK = 16


class HeadTrainer(ABC):
    """Parameters of a head and their optimizer. The policy is frozen.

    The engine recomputes the policy's rows of each sample with its current weights.

    Args:
        engine: Engine of the policy.
        params: Parameters by name, float32.
        known: Token ids of the policy that the head knows, int64.
        places: Number of tokens ahead to draft.
        learning_rate: Learning rate of AdamW.
        generator: Source of random numbers for the order of samples.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        params: Mapping[str, Tensor],
        known: Tensor,
        places: int,
        learning_rate: float,
        generator: torch.Generator,
    ) -> None:
        self.engine, self.known, self.places = engine, known, places
        self.learned = known  # token ids over which the loss compares distributions
        self.params = {
            name: torch.nn.Parameter(tensor.float().contiguous()) for name, tensor in params.items()
        }
        self._generator = generator
        self.optimizer = torch.optim.AdamW(
            self.params.values(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)
        )

    # -- the head ----------------------------------------------------------------------------------

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the tensors by their public names, in the policy's dtype."""

    @abstractmethod
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that an engine can draft with. Raise `ConfigError` if the folder already
        holds a model.
        """

    @abstractmethod
    def _tapped(self) -> Sequence[int]:
        """Return the layers before which the head reads the residual stream."""

    @abstractmethod
    def _embedding(self) -> Tensor | None:
        """Return the embedding that the head reads, or None if it reads none."""

    @abstractmethod
    def _draft_rows(self, rows: PolicyRows) -> list[Tensor]:
        """Return the rows that drafts are drawn from by depth, bounded as `PolicyRows.targets`."""

    @abstractmethod
    def _draft_logits(self, depth: int, hidden: Tensor, head: Tensor) -> Tensor:
        """Return the logits of the known tokens. `head` holds the policy's rows of the tokens that
        are compared, float32.
        """

    # -- training ----------------------------------------------------------------------------------

    def train(
        self, samples: Iterable[TrainingSample], *, epochs: int = 1, batch_size: int = 4
    ) -> float:
        """Train on the policy's samples and return the mean loss of the last epoch.

        The loss is the cross entropy to the policy's distribution over the known tokens, in nats.

        Args:
            samples: Samples of the policy. Their prompts are not learned.
            epochs: Number of passes over the samples.
            batch_size: Samples in each step of the optimizer.
        """
        every = self._rows(samples)
        head = numbers(self.engine.model.head).float()[self.learned]
        mean = float("nan")
        for _ in range(epochs):
            order = torch.randperm(len(every), generator=self._generator).tolist()
            losses: list[float] = []
            for begin in range(0, len(order), batch_size):
                chosen = order[begin : begin + batch_size]
                self.optimizer.zero_grad(set_to_none=True)
                for index in chosen:
                    loss = self._loss(every[index], head)
                    (loss / len(chosen)).backward()
                    losses.append(float(loss.detach()))
                torch.nn.utils.clip_grad_norm_(self.params.values(), 1.0)
                self.optimizer.step()
            mean = sum(losses) / len(losses)
        return mean

    def refresh(self, samples: Iterable[TrainingSample], *, epochs: int = 1) -> float:
        """Train on new samples and update the engine's draft heads."""
        loss = self.train(samples, epochs=epochs)
        self.engine.update_draft(self.weights())
        return loss

    @torch.no_grad()
    def agreement(self, samples: Iterable[TrainingSample]) -> list[float]:
        """Return, for each depth, how often the drafts up to it equal the policy's draws.

        Drafts and draws share the noise, at temperature 1 without filters. Measures at most 256
        tokens of each sample.
        """
        head = numbers(self.engine.model.head).float()
        right, seen = [0] * self.places, [0] * self.places
        for rows in self._rows(samples):
            stop = min(len(rows.token_ids), rows.first + MOST_ROWS)
            rows = replace(
                rows,
                token_ids=rows.token_ids[:stop],
                hidden=rows.hidden[:stop],
                taps=rows.taps[:stop],
                embedded=rows.embedded[:stop],
            )
            self._count_right(rows, head, right, seen)
        return [one / max(all_, 1) for one, all_ in zip(right, seen, strict=True)]

    def _count_right(
        self, rows: PolicyRows, head: Tensor, right: list[int], seen: list[int]
    ) -> None:
        first, stop = rows.targets(0)
        if stop <= first:
            return
        logits = self._policy_logits(rows.hidden[first:stop], head)
        uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
        noise = -(-uniform.clamp_min(1e-20).log()).log()
        chosen = (logits.log_softmax(-1) + noise).argmax(-1)
        so_far: Tensor | None = None
        for depth, hidden in enumerate(self._draft_rows(rows)):
            begin, _ = rows.targets(depth)
            drafts = self._draft_logits(depth, hidden, head).log_softmax(-1)
            known_noise = noise[begin - first :][:, self.known]
            equal = self.known[(drafts + known_noise).argmax(-1)] == chosen[begin - first :]
            # only bases that the first depth has too
            equal = equal[first - begin + depth :]
            so_far = equal if so_far is None else so_far[: len(equal)] & equal
            right[depth] += int(so_far.sum())
            seen[depth] += len(so_far)

    def _loss(self, rows: PolicyRows, head: Tensor) -> Tensor:
        total, weight = torch.zeros(()), 0.0
        first, end = rows.targets(0)
        wanted = self._policy_logits(rows.hidden[first:end], head).softmax(-1)
        for depth, hidden in enumerate(self._draft_rows(rows)):
            if not len(hidden):
                break
            start, _ = rows.targets(depth)
            logprobs = self._draft_logits(depth, hidden, head).log_softmax(-1)
            total = total - DECAY**depth * (wanted[start - first :] * logprobs).sum(-1).mean()
            weight += DECAY**depth
        if weight:
            return total / weight
        # a sample too short for any draft has no loss
        return sum(each.sum() * 0 for each in self.params.values())  # pyright: ignore

    def _policy_logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return scaled(functional.linear(hidden, head), self.engine.spec.logit_scale)

    # -- rows of the policy ------------------------------------------------------------------------

    def _rows(self, samples: Iterable[TrainingSample]) -> list[PolicyRows]:
        """Compute the policy's rows of the samples, under the weights currently served."""
        usable = [each for each in samples if each.completion_tokens]
        if not usable:
            raise InvalidRequest(
                "no samples with a completion to train heads on; pass at least one."
            )
        # check now, because a sequence that is too long for a step would stop the engine
        most = len(self.engine.model.ropes[0].cos)
        for sample in usable:
            tokens = checked_ids(
                (*sample.prompt_tokens, *sample.completion_tokens), self.engine.spec.vocab_size
            )
            if len(tokens) > most:
                raise InvalidRequest(
                    f"a sample has {len(tokens)} tokens; this engine computes at most {most}."
                )
        rows: list[PolicyRows] = []
        # between steps: no other computation and no weight update at the same time
        self.engine.shared.between_steps(POLICY, lambda: rows.extend(self._computed(usable)))
        return rows

    @torch.no_grad()
    def _computed(self, samples: Sequence[TrainingSample]) -> list[PolicyRows]:
        policy, embedding = self.engine.model, self._embedding()
        taps = Taps(self._tapped()) if self._tapped() else None
        model = policy.twin(taps=taps)
        lengths = [len(each.prompt_tokens) + len(each.completion_tokens) for each in samples]
        blocks = -(-max(lengths) // BLOCK)
        storage = KVStorage(policy.spec, blocks, BLOCK, policy.dtype, policy.device)
        computed: list[PolicyRows] = []
        for sample, length in zip(samples, lengths, strict=True):
            ids = [*sample.prompt_tokens, *sample.completion_tokens]
            sample_rows = Rows(ids, 0, range(blocks))
            batch = batch_of_rows([sample_rows], BLOCK, draws=range(length), device=policy.device)
            hidden = as_torch(model.forward(batch, storage).hidden)
            computed.append(
                PolicyRows(
                    token_ids=torch.tensor(ids),
                    hidden=hidden.float().clone(),
                    taps=torch.empty(length, 0) if taps is None else as_torch(taps.rows(length)),
                    embedded=torch.empty(length, 0)
                    if embedding is None
                    else embedding[torch.tensor(ids)].float(),
                    first=max(len(sample.prompt_tokens), 1),
                )
            )
        return computed


def require_places(places: int) -> None:
    """Raise `ConfigError` for fewer than one token to draft ahead."""
    if places < 1:
        raise ConfigError(f"places={places} must be at least 1.")


def known_ids(name: str, tokens: Sequence[int], vocab_size: int) -> Tensor:
    """Return an argument's token ids, sorted and without repetitions. Raise `ConfigError` for
    invalid ones.
    """
    ids = sorted(set(tokens))
    if not ids or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ConfigError(f"{name} must be ids from 0 to {vocab_size - 1}.")
    return torch.tensor(ids)

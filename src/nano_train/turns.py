"""Turns of a rollout as token ids: a client that serves the run's engine and keeps every token.

The server renders a whole chat for each turn. The tokens of earlier turns then stay as they were
sampled, and only the text after them is taken from the rendering. A rollout therefore is one
sample, whose appended tokens have `loss_mask` False, as if `resume_from` had continued it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Unpack

from nano_inference import ContextVersions, InferenceEngine, SamplingParams, TrainingSample
from nano_inference import VersionSpan as Span
from nano_inference.errors import InvalidRequest
from nano_inference.remote import Generate, InProcessClient, RequestStream
from nano_inference.types import Delta, Limits

BACKLOG = 1 << 20  # unread tokens of a turn: a rollout is as slow as its environment
# Fields that a request may set: they change no distribution, or the run decides them.
_FREE = {
    *("temperature", "max_tokens", "seed", "adapter", "stop", "stop_token_ids"),
    *("top_logprobs", "cache_salt", "priority", "keep_cache_seconds", "cache_priority"),
}


@dataclass
class Rollout:
    """Turns of one rollout.

    Attributes:
        params: Sampling parameters of every turn. Noise depends on seed and position, so each turn
            draws its own.
        turns: Samples of the turns so far. Each prompt begins with all tokens before it.
    """

    params: SamplingParams
    turns: list[TrainingSample] = field(default_factory=list[TrainingSample])
    _rendered: list[int] = field(default_factory=list[int])  # last prompt, as the server has it
    _is_open: bool = False

    def begin(self, rendered: list[int], ends: Sequence[int]) -> list[int]:
        """Begin a turn, and return its prompt.

        Args:
            rendered: Ids of the whole chat, as the template renders it.
            ends: Ids that end a turn of the model.

        Raises:
            InvalidRequest: Another turn is open, or the chat does not continue the last turn.
        """
        if self._is_open:
            raise InvalidRequest("a turn of this rollout is open; wait for its end.")
        prompt = rendered
        if self.turns:
            last = self.turns[-1]
            past = [*last.prompt_tokens, *last.completion_tokens]
            prompt = past + self._after(rendered, last.completion_tokens[-1], ends)
        self._rendered, self._is_open = rendered, True
        return prompt

    def _after(self, rendered: list[int], last: int, ends: Sequence[int]) -> list[int]:
        """Return the rendered ids after the last turn, whose last id is `last`."""
        start = len(self._rendered)
        closing = next((at for at in range(start, len(rendered)) if rendered[at] in ends), None)
        if rendered[:start] != self._rendered or closing is None:
            raise InvalidRequest(
                "the chat does not continue the last turn: the environment or the chat template "
                "changes earlier messages, which cannot be trained on as one sample."
            )
        return rendered[closing + (last in ends) :]

    def end(self, sample: TrainingSample | None) -> None:
        """End a turn. None, or an aborted sample: the turn may be asked for again."""
        self._is_open = False
        if sample is not None and sample.finish_reason != "abort":
            self.turns.append(sample)


class RolloutClient(InProcessClient):
    """Client of the run's engine that answers only requests of open rollouts.

    Args:
        engine: Engine of the run.

    Attributes:
        rollouts: Open rollouts by the session id of their requests.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        super().__init__(engine, BACKLOG)
        self.rollouts: dict[str, Rollout] = {}

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        num_samples: int = 1,
        *,
        stream: bool,
        name: str | None = None,
        session: str | None = None,
        on_overflow: Callable[[], None] | None = None,
        **limits: Unpack[Limits],
    ) -> RequestStream:
        """Queue the next turn of the rollout `session`, with the rollout's parameters.

        Raises `InvalidRequest` like `Rollout.begin`, and for a request of no open rollout, for
        several samples, and for parameters that change the distribution.
        """
        rollout = self.rollouts.get(session or "")
        if rollout is None:
            raise InvalidRequest("the request belongs to no open rollout of this run.")
        if num_samples != 1:
            raise InvalidRequest(f"n={num_samples} must be 1: a turn has one answer.")
        _require_plain(params)
        whole = rollout.begin(prompt, self.info.eos_token_ids)
        room = self.info.max_model_len - len(whole)
        limit = min(rollout.params.max_tokens, params.max_tokens, room)
        try:
            if limit < 1:
                raise InvalidRequest(f"the chat has {len(whole)} tokens and leaves no room.")
            message = Generate(0, whole, replace(rollout.params, max_tokens=limit), 1, stream)
            turn = _Turn(rollout, self, name, on_overflow)
            turn.request_id = self.begin(turn, message, 1)
        except Exception:
            rollout.end(None)
            raise
        return turn


class _Turn(RequestStream):
    """Stream of a turn's deltas, which also ends the turn."""

    request_id: int

    def __init__(
        self,
        rollout: Rollout,
        client: RolloutClient,
        name: str | None,
        on_overflow: Callable[[], None] | None,
    ) -> None:
        super().__init__(1, BACKLOG, lambda: client.give_up(self.request_id), name, on_overflow)
        self._rollout = rollout

    def put(self, delta: Delta) -> None:
        """Take in a delta."""
        if delta.finished is not None:
            self._rollout.end(delta.finished)
        super().put(delta)

    def fail(self, problem: Exception) -> None:
        """End the stream with an error."""
        if self.samples_left:
            self._rollout.end(None)
        super().fail(problem)


def _require_plain(params: SamplingParams) -> None:
    plain = SamplingParams()
    for name in (option.name for option in fields(SamplingParams)):
        if name not in _FREE and getattr(params, name) != getattr(plain, name):
            raise InvalidRequest(
                f"{name} changes the distribution, but the trainer computes the plain one; remove "
                "it from the environment's requests."
            )


def joined(turns: Sequence[TrainingSample]) -> TrainingSample:
    """Return the turns of a rollout as one sample. Tokens between them have `loss_mask` False."""
    first, last = turns[0], turns[-1]
    if len(turns) == 1:
        return first
    start = len(first.prompt_tokens)
    tokens = (last.prompt_tokens + last.completion_tokens)[start:]
    starts = [len(turn.prompt_tokens) - start for turn in turns]

    def spread(name: str, other: Any) -> tuple[Any, ...]:
        values = [other] * len(tokens)
        for turn, at in zip(turns, starts, strict=True):
            row = getattr(turn, name)
            values[at : at + len(row)] = row
        return tuple(values)

    return replace(
        last,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=tokens,
        logprobs=spread("logprobs", 0.0),
        ref_logprobs=None if last.ref_logprobs is None else spread("ref_logprobs", 0.0),
        log_kept_mass=None if last.log_kept_mass is None else spread("log_kept_mass", 0.0),
        loss_mask=spread("loss_mask", False),
        weight_versions=_one_span(last.weight_versions, len(tokens)),
        adapter_versions=_one_span(last.adapter_versions, len(tokens)),
        kv_versions=tuple(
            ContextVersions(at + context.token_start, at + context.token_end, context.versions)
            for turn, at in zip(turns, starts, strict=True)
            for context in turn.kv_versions
        ),
        text=None,
        sampling_params=replace(last.sampling_params, max_tokens=len(tokens))
        if last.sampling_params is not None
        else None,
    )


def _one_span(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """Return the span of all tokens: weights change between steps, never within a rollout."""
    return (Span(spans[0].version, 0, length),) if spans else ()

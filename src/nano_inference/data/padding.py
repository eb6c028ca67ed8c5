"""Conversion of samples to rectangular tensors."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from nano_inference.data.columns import DataError
from nano_inference.types import TrainingSample

if TYPE_CHECKING:
    import torch

# Fields with one number for each completion token.
_PER_TOKEN = ("logprobs", "ref_logprobs", "raw_logprobs", "log_kept_mass")


def pad_samples(
    samples: Sequence[TrainingSample],
    pad_token_id: int,
    *,
    prompt_side: Literal["left", "right"] = "left",
    max_length: int | None = None,
) -> "dict[str, torch.Tensor]":
    """Return prompts and completions as rectangular tensors of B samples (rows) and T columns.

    `prompt_side="left"` is the layout of TRL and verl: prompts are padded on the left and
    completions on the right. All completions begin in the same column, `P = prompt_lengths.max()`,
    so `input_ids[:, P:]` are the completions. With `"right"`, every row is prompt, completion,
    padding.

    Args:
        samples: Samples, one per row.
        pad_token_id: Id of padding in `input_ids`.
        prompt_side: Side on which prompts are padded.
        max_length: Maximum of T. Longer completions are truncated, as `completion_lengths` shows.
            In the layout `"left"`, all are truncated at the same column. Prompts are never
            truncated, because the logprobs would no longer match.

    Returns:
        A dict of CPU tensors:
            input_ids: int64 [B, T].
            attention_mask: bool [B, T], True at tokens of the sample.
            completion_mask: bool [B, T], True at completion tokens.
            loss_mask: bool [B, T], True at sampled completion tokens, over which a loss is
                computed. Differs from `completion_mask` only at appended tokens (of a tool or an
                environment).
            position_ids: int64 [B, T], position in the sample, or 0 at padding.
            weight_versions: int64 [B, T], weight version that sampled the completion token, or -1
                elsewhere.
            prompt_lengths, completion_lengths: int64 [B], lengths within the row.
            logprobs: float32 [B, T], logprob of the token in the same column (a model's logits at t
                - 1 predict it), or 0 outside of completions.
            ref_logprobs, raw_logprobs, log_kept_mass: likewise, each only if every sample has it.

    Raises:
        DataError: A prompt leaves no room for a token within `max_length`, or a field of a sample
            does not have one number per completion token.
    """
    import torch

    if prompt_side not in ("left", "right"):
        raise DataError(f"prompt_side={prompt_side!r} must be 'left' or 'right'.")
    prompt_width = max((len(sample.prompt_tokens) for sample in samples), default=0)
    begins = [
        prompt_width if prompt_side == "left" else len(sample.prompt_tokens) for sample in samples
    ]
    ends = [
        begin + len(sample.completion_tokens) for begin, sample in zip(begins, samples, strict=True)
    ]
    if max_length is not None:
        if prompt_width >= max_length:
            longest = max(range(len(samples)), key=lambda row: len(samples[row].prompt_tokens))
            raise DataError(
                f"max_length={max_length} leaves no room for a completion after the "
                f"{prompt_width} prompt tokens of sample {longest}; raise it above "
                f"{prompt_width} or omit that sample."
            )
        ends = [min(end, max_length) for end in ends]
    shape = (len(samples), max(ends, default=0))
    numbers = [
        name for name in _PER_TOKEN if all(getattr(sample, name) is not None for sample in samples)
    ]
    batch = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "completion_mask": torch.zeros(shape, dtype=torch.bool),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "weight_versions": torch.full(shape, -1, dtype=torch.int64),
        "prompt_lengths": torch.tensor(
            [len(sample.prompt_tokens) for sample in samples], dtype=torch.int64
        ),
        "completion_lengths": torch.tensor(ends, dtype=torch.int64)
        - torch.tensor(begins, dtype=torch.int64),
        **{name: torch.zeros(shape, dtype=torch.float32) for name in numbers},
    }
    for row, (sample, begin, end) in enumerate(zip(samples, begins, ends, strict=True)):
        _require_one_a_token(sample, row, numbers)
        for name in numbers:
            batch[name][row, begin:end] = torch.tensor(
                getattr(sample, name)[: end - begin], dtype=torch.float32
            )
        first = begin - len(sample.prompt_tokens)
        tokens = (*sample.prompt_tokens, *sample.completion_tokens)[: end - first]
        batch["input_ids"][row, first:end] = torch.tensor(tokens, dtype=torch.int64)
        batch["attention_mask"][row, first:end] = True
        batch["completion_mask"][row, begin:end] = True
        sampled = torch.tensor(_sampled(sample), dtype=torch.bool)
        batch["loss_mask"][row, begin:end] = sampled[: end - begin]
        batch["position_ids"][row, first:end] = torch.arange(end - first)
        versions = torch.tensor(_versions(sample), dtype=torch.int64)
        batch["weight_versions"][row, begin:end] = versions[: end - begin]
    return batch


def _require_one_a_token(sample: TrainingSample, row: int, names: Sequence[str]) -> None:
    length = len(sample.completion_tokens)
    for name in (*names, *(["loss_mask"] if sample.loss_mask else [])):
        if len(getattr(sample, name)) != length:
            raise DataError(
                f"sample {row} has {len(getattr(sample, name))} {name} for {length} completion "
                "tokens; give one per token."
            )


def _sampled(sample: TrainingSample) -> Sequence[bool]:
    # A handmade sample may lack the mask: then no token was appended.
    return sample.loss_mask or (True,) * len(sample.completion_tokens)


def _versions(sample: TrainingSample) -> list[int]:
    # A handmade sample may have only `weight_version`.
    count = len(sample.completion_tokens)
    versions = [sample.weight_version] * count
    for span in sample.weight_versions:
        versions[span.start : span.end] = [span.version] * len(range(count)[span.start : span.end])
    return versions

"""Samples as rectangular tensors."""

from collections.abc import Sequence
from typing import Literal

import torch

from nano_inference.data.columns import DataError
from nano_inference.types import TrainingSample

# Fields with one number for each completion token.
_PER_TOKEN = ("logprobs", "ref_logprobs", "raw_logprobs", "log_kept_mass")


def pad_samples(
    samples: Sequence[TrainingSample],
    pad_token_id: int,
    *,
    prompt_side: Literal["left", "right"] = "left",
    max_length: int | None = None,
) -> dict[str, torch.Tensor]:
    """Prompts and completions as rectangular tensors of B samples (rows) and T columns.

    With `prompt_side="left"`, what TRL and verl expect, prompts are padded on their left and
    completions on their right: all completions begin in the same column, `P =
    prompt_lengths.max()`, so that `input_ids[:, P:]` are the completions. With `"right"` every row
    is prompt, completion, padding.

    Args:
        samples: any number of them.
        pad_token_id: in every other place of `input_ids`.
        prompt_side: where prompts are padded.
        max_length: T at most. Completions that reach further lose their end, which
            `completion_lengths` shows; in the layout `"left"` all are cut in the same column.
            Prompts are never cut: logprobs would no longer be theirs.

    Returns:
        A dict of CPU tensors:
            input_ids: int64 [B, T].
            attention_mask: bool [B, T], True at tokens of the sample.
            completion_mask: bool [B, T], True at completion tokens.
            loss_mask: bool [B, T], True at completion tokens that were sampled: what a loss is
            taken over. It differs
                from `completion_mask` only where tokens were appended (a tool's, an environment's).
            position_ids: int64 [B, T], position in the sample; 0 at padding.
            weight_versions: int64 [B, T], which weights sampled the completion token; -1 elsewhere.
            prompt_lengths, completion_lengths: int64 [B], what stands in the row.
            logprobs: float32 [B, T]. The entry in column t is of the token in column t (a model's
            logits at t - 1
                predict it); 0 outside of completions.
            ref_logprobs, raw_logprobs, log_kept_mass: likewise, each only if every sample has it.

    Raises:
        DataError: a prompt does not leave room for a token within `max_length`, or a sample's
            numbers are not one a token.
    """
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
                f"{prompt_width} prompt tokens of "
                f"sample {longest}; raise it above {prompt_width} or leave that sample out."
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
        batch["loss_mask"][row, begin:end] = _sampled(sample)[: end - begin]
        batch["position_ids"][row, first:end] = torch.arange(end - first)
        batch["weight_versions"][row, begin:end] = _versions(sample)[: end - begin]
    return batch


def _require_one_a_token(sample: TrainingSample, row: int, names: Sequence[str]) -> None:
    length = len(sample.completion_tokens)
    for name in (*names, *(["loss_mask"] if sample.loss_mask else [])):
        if len(getattr(sample, name)) != length:
            raise DataError(
                f"sample {row} has {len(getattr(sample, name))} {name} for {length} completion "
                "tokens; there must be "
                "one a token."
            )


def _sampled(sample: TrainingSample) -> torch.Tensor:
    # A sample that was made by hand may have no mask: nothing of it was appended.
    return torch.tensor(
        sample.loss_mask or (True,) * len(sample.completion_tokens), dtype=torch.bool
    )


def _versions(sample: TrainingSample) -> torch.Tensor:
    # A sample that was made by hand may name its one version alone.
    versions = torch.full(
        (len(sample.completion_tokens),), sample.weight_version, dtype=torch.int64
    )
    for span in sample.weight_versions:
        versions[span.start : span.end] = span.version
    return versions

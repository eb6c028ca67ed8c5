"""Logprobs of token ids that a request names: targets at prompt positions, and the results."""

import math
import struct
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

from nano_inference.core.sequence import Sequence
from nano_inference.types import LogprobMatrix, SamplingParams, TrainingSample


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Tokens to score after each scored row of a prompt: the next token, then the named ids.

    Rows are made on demand, because their number times their width may be large. A row with fewer
    ids is padded with the next token.

    Attributes:
        prompt: Tokens of the prompt.
        params: Parameters with `prompt_logprob_token_ids`.
        rows: Scored rows.
        width: Number of tokens of each row.
    """

    prompt: Listed[int]
    params: SamplingParams
    rows: range
    width: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._row(row) for row in self.rows[index]]
        return self._row(self.rows[index])

    def _row(self, row: int) -> list[int]:
        following = self.prompt[row + 1]
        ids = named_at(self.params, row)
        return [following, *ids, *[following] * (self.width - 1 - len(ids))]


def named_at(params: SamplingParams, row: int) -> tuple[int, ...]:
    """Return the ids that are named for the token after a row of the prompt."""
    rows, index = params.prompt_logprob_token_ids, row - params.prompt_logprob_start
    if not rows or index < 0:
        return ()
    return rows[0] if len(rows) == 1 else rows[index]


def prompt_targets(params: SamplingParams, prompt: Listed[int], rows: range) -> Listed[Listed[int]]:
    """Return the tokens to score after each scored row. Empty: only the next token."""
    named = max(map(len, params.prompt_logprob_token_ids), default=0)
    return PromptTargets(prompt, params, rows, 1 + named) if named else ()  # pyright: ignore


def prompt_scoring(params: SamplingParams, prompt: Listed[int]) -> dict[str, Any]:
    """Return the fields of `CheckedRequest` for logprobs at prompt positions."""
    first = 0 if params.prompt_logprobs else params.prompt_logprob_start
    rows = range(first, len(prompt) - 1) if params.scores_prompt else range(0)
    targets = prompt_targets(params, prompt, rows)
    return {"scored": rows, "score_targets": targets, "num_best": params.prompt_top_logprobs}


def named_logprobs(seq: Sequence) -> dict[str, LogprobMatrix]:
    """Return the fields of a sample that hold logprobs of named ids."""
    params, fields = seq.request.params, dict[str, LogprobMatrix]()
    width, rows = len(params.logprob_token_ids), slice(0, seq.num_completion_tokens)
    if width:
        fields |= of_rows(seq, rows)
    if params.prompt_logprob_token_ids:
        request = seq.request
        fields["prompt_token_id_logprobs"] = prompt_matrix(
            params, request.scored.start, request.score_width, seq.scores
        )
    return fields


def of_rows(seq: Sequence, rows: slice) -> dict[str, Any]:
    """Return the logprobs of named ids at some completion tokens, by field of a sample."""
    params = seq.request.params
    width = len(params.logprob_token_ids)
    if not width:
        return {}
    columns = {"token_id_logprobs": seq.output_named}
    if params.raw_logprobs:
        columns["raw_token_id_logprobs"] = seq.output_raw_named
    kept = slice(rows.start * width * 4, rows.stop * width * 4)
    return {
        name: LogprobMatrix((rows.stop - rows.start, width), bytes(data[kept]))
        for name, data in columns.items()
    }


def prompt_matrix(
    params: SamplingParams, first: int, width: int, scores: Listed[float]
) -> LogprobMatrix:
    """Return the logprobs of the ids that are named at prompt positions.

    Args:
        params: Parameters with `prompt_logprob_token_ids`.
        first: First scored row.
        width: Number of scores of each row: its next token, then the named ids.
        scores: All scores so far.
    """
    data, rows = bytearray(), range(params.prompt_logprob_start, first + len(scores) // width)
    for row in rows:
        at, num_named = (row - first) * width + 1, len(named_at(params, row))
        cut = [-math.inf] * (width - 1 - num_named)
        data += struct.pack(f"<{width - 1}f", *scores[at : at + num_named], *cut)
    return LogprobMatrix((len(rows), width - 1), bytes(data))


def resumed_scores(sample: TrainingSample, params: SamplingParams) -> list[float]:
    """Return the scores of a resumed sample's prompt, as its new sequence holds them."""
    logprobs, named = sample.prompt_logprobs, sample.prompt_token_id_logprobs
    if named is None:
        return list((logprobs or ())[1:])
    scores: list[float] = []
    rows = named.tolist()
    first = 0 if params.prompt_logprobs else params.prompt_logprob_start
    for row in range(first, len(sample.prompt_tokens) - 1):
        index = row - params.prompt_logprob_start
        scores.append(math.nan if logprobs is None else logprobs[row + 1])
        scores += [math.nan] * named.shape[1] if index < 0 else rows[index]
    return scores


def fill_named(seq: Sequence, sample: TrainingSample, num_appended: int) -> None:
    """Copy a sample's logprobs of named ids to its new sequence. Appended tokens get nan."""
    columns = (
        (sample.token_id_logprobs, seq.output_named),
        (sample.raw_token_id_logprobs, seq.output_raw_named),
    )
    for matrix, column in columns:
        if matrix is not None:
            unknown = struct.pack("<f", math.nan) * (matrix.shape[1] * num_appended)
            column += matrix.data + unknown

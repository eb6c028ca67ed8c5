"""A sample's own record of its computation: the sampled tokens, and the weight versions of their
contexts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nano_inference.errors import InvalidRequest
from nano_inference.types import ContextVersions, TrainingSample, VersionSpan


@dataclass(frozen=True, slots=True)
class Stretch:
    """Completion tokens [start, end), and the weight version of each row of their context.

    There are P + end - 1 rows, with P prompt tokens.
    """

    start: int
    end: int
    row_versions: tuple[int, ...]


def was_sampled(sample: TrainingSample) -> tuple[bool, ...]:
    """Return, for each completion token, True if it was sampled rather than appended."""
    return sample.loss_mask or (True,) * len(sample.completion_tokens)


def stretches(sample: TrainingSample) -> list[Stretch]:
    """Check a sample's `kv_versions` and return them row by row. Raises `InvalidRequest`.

    A sample without `kv_versions` must have a single weight version, which applies to all rows.
    """
    length, sampled = len(sample.completion_tokens), was_sampled(sample)
    if len(sampled) != length:
        raise InvalidRequest(
            f"loss_mask has {len(sampled)} entries for {length} completion tokens; it must have "
            "one for each."
        )
    checked: list[Stretch] = []
    covered = [False] * length
    for entry in sample.kv_versions or _of_one_version(sample):
        start, end = entry.token_start, entry.token_end
        if not (checked[-1].end if checked else 0) <= start < end <= length:
            raise InvalidRequest(
                f"kv_versions must be in order and within the {length} completion tokens; tokens "
                f"[{start}, {end}) are not."
            )
        checked.append(
            Stretch(start, end, tuple(_rows(entry, len(sample.prompt_tokens) + end - 1)))
        )
        covered[start:end] = [True] * (end - start)
    for index in range(length):
        if sampled[index] and not covered[index]:
            raise InvalidRequest(
                f"kv_versions do not cover completion token {index}; every sampled token needs "
                "the weight versions of its context."
            )
    return checked


def versions_of(sample: TrainingSample) -> set[int]:
    """Return the weight versions that a replay needs. Raises `InvalidRequest`."""
    return {version for stretch in stretches(sample) for version in stretch.row_versions}


def _of_one_version(sample: TrainingSample) -> list[ContextVersions]:
    length = len(sample.completion_tokens)
    versions = {span.version for span in sample.weight_versions} or {sample.weight_version}
    if len(versions) > 1:
        raise InvalidRequest(
            f"the sample has weight versions {', '.join(map(str, sorted(versions)))} but no "
            "kv_versions; without them, the version of each row of its context is unknown."
        )
    if not length:
        return []
    rows = len(sample.prompt_tokens) + length - 1
    return [ContextVersions(0, length, (VersionSpan(versions.pop(), 0, rows),))]


def _rows(entry: ContextVersions, num_rows: int) -> Iterator[int]:
    at = 0
    for span in entry.versions:
        if span.start != at or not at < span.end <= num_rows:  # reject before rows are allocated
            break
        yield from [span.version] * (span.end - span.start)
        at = span.end
    if at != num_rows or (entry.versions and entry.versions[-1].end != num_rows):
        raise InvalidRequest(
            f"kv_versions of tokens [{entry.token_start}, {entry.token_end}) must tile the "
            f"{num_rows} rows of their context in order; got "
            f"{[(span.start, span.end) for span in entry.versions]}."
        )

"""What a sample says of its own making: which tokens were drawn, and which weights computed what
they attended to.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nano_inference.errors import InvalidRequest
from nano_inference.types import ContextVersions, TrainingSample, VersionSpan


@dataclass(frozen=True, slots=True)
class Stretch:
    """Completion tokens [start, end), and the version that computed each row of their context: [P +
    end - 1].
    """

    start: int
    end: int
    row_versions: tuple[int, ...]


def was_sampled(sample: TrainingSample) -> tuple[bool, ...]:
    """For each completion token whether it was sampled rather than appended."""
    return sample.loss_mask or (True,) * len(sample.completion_tokens)


def stretches(sample: TrainingSample) -> list[Stretch]:
    """The sample's `kv_versions` row by row; checked. Raises `InvalidRequest`.

    A sample that has none, but one weight version, was computed by that one.
    """
    length, sampled = len(sample.completion_tokens), was_sampled(sample)
    if len(sampled) != length:
        raise InvalidRequest(
            f"the sample has {len(sampled)} loss_mask for {length} completion tokens."
        )
    found: list[Stretch] = []
    covered = [False] * length
    for entry in sample.kv_versions or _of_one_version(sample):
        start, end = entry.token_start, entry.token_end
        if not (found[-1].end if found else 0) <= start < end <= length:
            raise InvalidRequest(
                f"kv_versions: tokens [{start}, {end}) do not follow those before them in {length}."
            )
        found.append(Stretch(start, end, tuple(_rows(entry, len(sample.prompt_tokens) + end - 1))))
        covered[start:end] = [True] * (end - start)
    for index in range(length):
        if sampled[index] and not covered[index]:
            raise InvalidRequest(
                f"kv_versions do not say which weights computed what completion token {index} saw."
            )
    return found


def versions_of(sample: TrainingSample) -> set[int]:
    """The weight versions that a replay needs. Raises `InvalidRequest`."""
    return {version for stretch in stretches(sample) for version in stretch.row_versions}


def _of_one_version(sample: TrainingSample) -> list[ContextVersions]:
    length = len(sample.completion_tokens)
    versions = {span.version for span in sample.weight_versions} or {sample.weight_version}
    if len(versions) > 1:
        raise InvalidRequest(
            f"the sample is of weight versions {', '.join(map(str, sorted(versions)))} and has no "
            "kv_versions, so "
            "it is not known which of them computed the context of its tokens."
        )
    if not length:
        return []
    rows = len(sample.prompt_tokens) + length - 1
    return [ContextVersions(0, length, (VersionSpan(versions.pop(), 0, rows),))]


def _rows(entry: ContextVersions, num_rows: int) -> Iterator[int]:
    at = 0
    for span in entry.versions:
        if span.start != at or not at < span.end <= num_rows:  # before there is a row of each
            break
        yield from [span.version] * (span.end - span.start)
        at = span.end
    if at != num_rows or (entry.versions and entry.versions[-1].end != num_rows):
        raise InvalidRequest(
            f"kv_versions of tokens [{entry.token_start}, {entry.token_end}) must tile the "
            f"{num_rows} rows of their "
            f"context in order, not {[(span.start, span.end) for span in entry.versions]}."
        )

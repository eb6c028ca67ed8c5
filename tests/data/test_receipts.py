"""Receipts: every change of a sample, and of the order and number of a file's lines, is located."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference import InvalidRequest, SamplingParams, TrainingSample, VersionSpan
from nano_inference.data import DataError, json_line, read_jsonl, sealed, write_jsonl
from nano_inference.data.receipts import (
    FIELDS_OF_CHAIN,
    LINK,
    Change,
    first_change,
    first_misplaced,
    receipt_of,
)
from nano_inference.structured.grammar import Grammar
from nano_inference.types import ContentHash, ContextVersions, TopLogprobs

HASHES = (ContentHash(0, "ab" * 32), ContentHash(3, ""))
# not part of a sample's statement
_LEFT_OUT = {"request_id", "group_id", "cached_tokens", "receipt"}


def made(length: int = 4, **changes: Any) -> TrainingSample:
    """Return a sample with its receipt."""
    logprobs = tuple(float(np.float32(-0.1 * (i + 1))) for i in range(length))
    sample = TrainingSample(
        prompt_tokens=(5, 6, 7),
        completion_tokens=tuple(range(10, 10 + length)),
        logprobs=logprobs,
        ref_logprobs=None,
        weight_version=3,
        finish_reason="length",
        weight_versions=(VersionSpan(0, 0, 1), VersionSpan(3, 1, length)),
        kv_versions=(ContextVersions(0, length, (VersionSpan(0, 0, length + 2),)),),
        log_kept_mass=logprobs,
        loss_mask=(True,) * length,
        numerics="cpu-7/float32/cpu",
        seed=11,
        sampling_params=SamplingParams(max_tokens=length, logit_bias={5: 1.0, 3: 2.0}),
        text="abc",
    )
    sample = replace(sample, **changes)
    return replace(sample, receipt=receipt_of(sample, HASHES))


def change_in(sample: TrainingSample) -> Change | None:
    assert sample.receipt is not None
    return first_change(sample, sample.receipt)


def test_chain_covers_every_field_of_a_sample() -> None:
    covered = {*FIELDS_OF_CHAIN, "completion_tokens", "logprobs", "loss_mask"}
    assert {each.name for each in fields(TrainingSample)} - _LEFT_OUT <= covered


CHANGED: dict[str, Any] = {
    "prompt_tokens": (5, 6, 8),
    "numerics": "cpu-7/bfloat16/cpu",
    "seed": 12,
    "sample_index": 1,
    "weight_version": 0,
    "weight_versions": (VersionSpan(3, 0, 4),),
    "kv_versions": (),
    "adapter_versions": (VersionSpan(1, 0, 4),),
    "finish_reason": "stop",
    "stop_reason": "x",
    "text": "abd",
    "ref_logprobs": (0.0,) * 4,
    "raw_logprobs": (0.0,) * 4,
    "log_kept_mass": (0.0,) * 4,
    "top_logprobs": (TopLogprobs((), ()),) * 4,
    "prompt_logprobs": (0.0,) * 3,
    "routed_experts_unknown": "lost",
}


@pytest.mark.parametrize("name", CHANGED)
def test_change_of_a_field_is_named(name: str) -> None:
    assert change_in(replace(made(), **{name: CHANGED[name]})) == Change(name)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.5}, "sampling_params"),
        ({"max_tokens": 9}, "sampling_params"),
        ({"logit_bias": {5: 2.0, 3: 1.0}}, "sampling_params"),
        ({"grammar": Grammar.regex("a+")}, "grammar"),
    ],
)
def test_change_of_a_parameter_is_named(changes: dict[str, Any], field: str) -> None:
    sample = made()
    assert sample.sampling_params is not None
    changed = replace(sample, sampling_params=replace(sample.sampling_params, **changes))
    assert change_in(changed) == Change(field)


def test_equal_parameters_have_one_chain() -> None:
    sample = made()
    assert sample.sampling_params is not None
    same = replace(sample.sampling_params, logit_bias={3: 2.0, 5: 1.0}, seed=11, receipt=True)
    assert change_in(replace(sample, sampling_params=same, request_id=9, cached_tokens=2)) is None


@given(st.integers(1, 12), st.data())
def test_change_of_a_token_is_located(length: int, data: st.DataObject) -> None:
    sample = made(length)
    at = data.draw(st.integers(0, length - 1))
    field = data.draw(st.sampled_from(["completion_tokens", "logprobs", "loss_mask"]))
    values: list[Any] = list(getattr(sample, field))
    up = float(np.nextafter(np.float32(sample.logprobs[at]), np.float32(1)))
    values[at] = {"completion_tokens": 99, "logprobs": up, "loss_mask": False}[field]
    changed = replace(sample, **{field: tuple(values)})
    assert change_in(changed) == Change("tokens", at)
    assert change_in(sample) is None


@given(st.integers(1, 8), st.integers(0, 7))
def test_lost_tokens_are_noticed(length: int, kept: int) -> None:
    sample = made(length)
    short = replace(sample, completion_tokens=sample.completion_tokens[: min(kept, length - 1)])
    assert change_in(short) == Change("num_tokens")


def test_head_commits_to_every_token() -> None:
    """A forger who computes the links again, but not the head, is found."""
    sample = made()
    forgery = replace(sample, completion_tokens=(99, *sample.completion_tokens[1:]))
    links = receipt_of(forgery, HASHES).links
    assert sample.receipt is not None
    receipt = replace(sample.receipt, links=links)
    assert first_change(forgery, receipt) == Change("receipt.head")


def test_broken_chains_are_named() -> None:
    sample = made()
    receipt = sample.receipt
    assert receipt is not None
    for changes, field in (
        ({"head": "00" * 32}, "receipt.head"),
        ({"head": "é"}, "receipt.head"),
        ({"links": receipt.links + bytes(LINK)}, "receipt.links"),
        ({"weights": HASHES[:1]}, "weights"),
    ):
        changed = replace(sample, receipt=replace(receipt, **changes))
        assert change_in(changed) == Change(field), changes
    cut = replace(sample, receipt=replace(receipt, links=receipt.links[:-1]))
    assert change_in(cut) == Change("tokens", 3)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True), st.randoms())
def test_lines_must_be_whole_and_in_order(seeds: list[int], random: Any) -> None:
    samples = sealed([made(seed=seed) for seed in seeds])
    assert first_misplaced(samples) is None
    shuffled = samples[:]
    random.shuffle(shuffled)
    assert (first_misplaced(shuffled) is None) == (shuffled == samples)
    gap = random.randrange(len(samples))
    assert first_misplaced(samples[:gap] + samples[gap + 1 :]) is not None
    assert first_misplaced([*samples, samples[-1]]) is not None
    other = sealed([made(seed=99)] * len(samples))
    assert first_misplaced([*other[:gap], samples[gap], *other[gap + 1 :]]) is not None


def test_unsealed_files_have_no_places() -> None:
    assert first_misplaced([made(), made()]) is None
    assert first_misplaced([replace(made(), receipt=None)]) is None
    mixed = [sealed([made()])[0], made()]
    assert first_misplaced(mixed) is not None


def test_receipts_survive_files(tmp_path: Path) -> None:
    samples = sealed([made(), made(seed=2)])
    write_jsonl(samples, tmp_path / "a.jsonl")
    again = read_jsonl(tmp_path / "a.jsonl")
    assert again == samples
    assert [*map(change_in, again)] == [None, None]


def _lines(sample: TrainingSample) -> Sequence[tuple[str, str]]:
    line = json_line(sample)
    receipt = json.loads(line)["receipt"]
    wrong: list[tuple[Any, str]] = [
        (5, "is not an object with format, weights"),
        (receipt | {"links": "?"}, "is not base64"),
        (receipt | {"format": "1"}, "is not of type int"),
        (receipt | {"format": None}, "is not of type int"),
        (receipt | {"more": 1}, "is not an object with format, weights"),
        (receipt | {"weights": [{"version": 0}]}, "is not an object with version, sha256"),
        (receipt | {"file_place": [1, 2]}, "is not an object with line, lines, chain"),
    ]
    spoiled = [(json.dumps(json.loads(line) | {"receipt": each}), text) for each, text in wrong]
    huge = line.replace('"seed": 11', '"seed": ' + "9" * 5000)
    return [*spoiled, (line[:-40], "is not JSON"), (huge, "is not JSON"), ("[1]", "is a list")]


@pytest.mark.parametrize("index", range(10))
def test_spoiled_lines_are_rejected(tmp_path: Path, index: int) -> None:
    line, text = _lines(made())[index]
    (tmp_path / "a.jsonl").write_text(json_line(made()) + "\n" + line + "\n")
    with pytest.raises(DataError, match=f"line 2.*{text}"):
        read_jsonl(tmp_path / "a.jsonl")


def test_receipt_must_be_true_or_false() -> None:
    with pytest.raises(InvalidRequest, match="receipt must be True or False"):
        SamplingParams(receipt=1)  # pyright: ignore[reportArgumentType]

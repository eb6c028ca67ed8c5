"""Samples as tensors, columns and files survive a round trip bit for bit."""

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import (
    ConfigError,
    LogprobMatrix,
    NanoInferenceError,
    RoutedExperts,
    SamplingParams,
    TrainingSample,
    VersionSpan,
    data,
)
from nano_inference.data import DataError, kinds
from tests.depth import at_depth

SIGNED = st.integers(-(2**63), 2**63 - 1)
ATOMS = {int: SIGNED, float: st.floats() | st.floats(width=32), str: st.text(), bool: st.booleans()}
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Generate any valid sampling parameters."""
    ids = st.integers(0, 2**40)
    stop = draw(st.frozensets(ids, max_size=3))
    max_tokens = draw(st.integers(1, 2**40))
    more = st.frozensets(ids, min_size=1, max_size=3).filter(lambda some: not some <= stop)
    temperature, top_p = draw(st.floats(0, 1e9)), draw(st.floats(0, 1, exclude_min=True))
    top_k, min_p = draw(st.integers(0, 2**40)), draw(st.floats(0, 1))
    filters = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        stop=tuple(draw(st.lists(st.text(min_size=1), max_size=2))),
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0.01, 100)),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.none() | more.map(lambda some: some | stop)),
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.none() | SEEDS),
        top_logprobs=draw(st.integers(0, 2**40)),
        prompt_logprobs=(scored := draw(st.booleans())),
        prompt_top_logprobs=draw(st.integers(0, 2**40)) if scored else 0,
        raw_logprobs=draw(st.booleans()),
        sampling_mask=filters and draw(st.booleans()),
        cache_salt=draw(st.none() | st.text()),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        routed_experts=draw(st.booleans()),
        thinking_token_budget=draw(st.none() | st.integers(0, 2**40)),
        bad_words=draw(st.lists(st.text(min_size=1), max_size=2)),
        logprob_token_ids=draw(st.lists(ids, max_size=3, unique=True)),
    )


@st.composite
def routed_experts(draw: st.DrawFn) -> RoutedExperts:
    """Generate any consistent expert arrays."""
    shape = draw(st.tuples(*[st.integers(0, 4)] * 3))
    dtype, size = draw(st.sampled_from([("uint8", 1), ("uint16", 2)]))
    length = math.prod(shape) * size
    return RoutedExperts(shape, dtype, draw(st.binary(min_size=length, max_size=length)))  # pyright: ignore[reportArgumentType]


@st.composite
def matrices(draw: st.DrawFn) -> LogprobMatrix:
    """Generate any bits, also those of infinities and NaN."""
    shape = draw(st.tuples(*[st.integers(0, 4)] * 2))
    length = 4 * math.prod(shape)
    return LogprobMatrix(shape, draw(st.binary(min_size=length, max_size=length)))


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Generate any value of a field's type."""
    arguments = typing.get_args(annotation)
    if annotation in ATOMS:
        return ATOMS[annotation]
    if annotation is SamplingParams:
        return sampling_params()
    if annotation is LogprobMatrix:
        return matrices()
    if annotation is RoutedExperts:
        return routed_experts()
    if annotation is types.NoneType:
        return st.none()
    if typing.get_origin(annotation) is Literal:
        return st.sampled_from(arguments)
    if typing.get_origin(annotation) is tuple:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if arguments:
        return st.one_of([values(argument) for argument in arguments])
    return st.builds(
        annotation,
        **{name: values(hint) for name, hint in typing.get_type_hints(annotation).items()},
    )


HINTS = typing.get_type_hints(TrainingSample)
SAMPLES = st.lists(
    st.builds(
        TrainingSample,
        **({name: values(hint) for name, hint in HINTS.items()} | {"seed": SEEDS}),
    ),
    max_size=4,
)
SAMPLE = TrainingSample(
    prompt_tokens=(1, 2, 3),
    completion_tokens=(4, 5),
    logprobs=(-0.5, -0.25),
    ref_logprobs=None,
    weight_version=1,
    finish_reason="stop",
    weight_versions=(VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def digits(samples: list[TrainingSample]) -> str:
    """Return exact digits by repr, which distinguish -0.0 from 0.0 and 1 from 1.0, and show NaN."""
    return "\n".join(
        f"{name}={sorted(value) if isinstance(value, frozenset) else value!r}"
        for sample in samples
        for record in (dataclasses.replace(sample, sampling_params=None), sample.sampling_params)
        for name, value in (
            vars(record) if isinstance(record, SamplingParams) else {"record": record}
        ).items()
    )


@pytest.mark.thorough
@settings(max_examples=at_depth(60), deadline=None)
@given(samples=SAMPLES)
def test_samples_survive_a_round_trip(folder: Path, samples: list[TrainingSample]) -> None:
    columns = data.to_columns(samples)
    assert list(columns) == [field.name for field in dataclasses.fields(TrainingSample)]
    data.write_jsonl(samples, folder / "a.jsonl")
    data.write_parquet(iter(samples), str(folder / "a.parquet"))
    again = {
        "columns": data.from_columns(columns),
        "jsonl": data.read_jsonl(folder / "a.jsonl"),
        "parquet": data.read_parquet(str(folder / "a.parquet")),
    }
    assert {way: digits(found) for way, found in again.items()} == dict.fromkeys(
        again, digits(samples)
    )


@pytest.mark.thorough
@settings(max_examples=at_depth(60), deadline=None)
@given(samples=SAMPLES)
def test_arrow_guesses_the_types_of_columns(samples: list[TrainingSample]) -> None:
    samples = [
        dataclasses.replace(s, seed=s.seed // 2, sampling_params=small(s.sampling_params))
        for s in samples
    ]
    table = pa.table(data.to_columns(samples))
    assert digits(data.from_columns(table.to_pydict())) == digits(samples)


def small(params: SamplingParams | None) -> SamplingParams | None:
    return (
        dataclasses.replace(params, seed=params.seed // 2)
        if params and params.seed is not None
        else params
    )


@pytest.mark.thorough
@settings(max_examples=at_depth(40), deadline=None)
@given(samples=SAMPLES)
def test_jsonl_lines_are_strict_json(folder: Path, samples: list[TrainingSample]) -> None:
    data.write_jsonl(samples, folder / "b.jsonl")
    lines = (folder / "b.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert len(lines) == len(samples)
    for line in lines:
        row = json.loads(line.decode("ascii"), parse_constant=pytest.fail)
        assert list(row) == list(HINTS)


def test_non_finite_numbers_survive_json(tmp_path: Path) -> None:
    sample = dataclasses.replace(
        SAMPLE, logprobs=(math.nan, math.inf, -math.inf, -0.0), stop_reason="x"
    )
    data.write_jsonl([sample], tmp_path / "a.jsonl")
    row = json.loads((tmp_path / "a.jsonl").read_text())
    assert row["logprobs"] == [None, "Infinity", "-Infinity", 0.0]
    assert row["stop_reason"] == {"int": None, "str": "x"}
    assert repr(data.read_jsonl(tmp_path / "a.jsonl")) == repr([sample])
    assert kinds.strict([{"logprobs": [math.nan, -math.inf]}]) == [
        {"logprobs": [None, "-Infinity"]}
    ]


def test_schema_does_not_depend_on_the_samples(tmp_path: Path) -> None:
    schemas = []
    for samples in (
        [],
        [SAMPLE],
        [dataclasses.replace(SAMPLE, ref_logprobs=(-1.0, -2.0), seed=2**64 - 1)],
    ):
        data.write_parquet(samples, tmp_path / "a.parquet")
        schemas.append(pyarrow.parquet.read_schema(tmp_path / "a.parquet"))
    assert schemas[0].equals(schemas[1])
    assert schemas[0].equals(schemas[2])
    assert schemas[0].field("ref_logprobs").type.value_type == pa.float64()


def test_params_keep_large_seeds_and_integers(tmp_path: Path) -> None:
    params = SamplingParams(
        temperature=0, top_p=1, logit_bias={7: 1, 3: -0.5}, stop_token_ids=frozenset([9, 4])
    )
    several = [
        dataclasses.replace(SAMPLE, sampling_params=each)
        for each in (None, params, dataclasses.replace(params, temperature=0.5, seed=2**64 - 1))
    ]
    data.write_parquet(several, tmp_path / "a.parquet")
    data.write_jsonl(several, tmp_path / "a.jsonl")
    assert (
        data.read_parquet(tmp_path / "a.parquet")
        == data.read_jsonl(tmp_path / "a.jsonl")
        == several
    )
    row = data.to_columns(several)["sampling_params"][1]
    assert row["logit_bias"] == [{"key": 7, "value": 1.0}, {"key": 3, "value": -0.5}]
    assert row["stop_token_ids"] == [4, 9]
    assert (
        pa.array(
            data.to_columns(several[:2] * 2)["sampling_params"] + [row | {"temperature": 0.5}]
        ).null_count
        == 2
    )


class Point(NamedTuple):
    x: int
    label: str | None


@pytest.mark.parametrize(
    ("annotation", "value", "plain"),
    [
        (
            tuple[Point, ...] | None,
            (Point(1, None), Point(2, "b")),
            [{"x": 1, "label": None}, {"x": 2, "label": "b"}],
        ),
        (bool, True, True),
        (int | str | None, 3, {"int": 3, "str": None}),
        (int | str | None, None, None),
        (frozenset[int], frozenset([2**40, 3, 5]), [3, 5, 2**40]),
        (frozenset[str] | None, None, None),
        (
            Mapping[int, float],
            {5: 0.5, 2: -1.0},
            [{"key": 5, "value": 0.5}, {"key": 2, "value": -1.0}],
        ),
    ],
)
def test_field_kinds_of_future_fields_are_supported(
    annotation: Any, value: Any, plain: Any
) -> None:
    kind = kinds.kind_of(annotation)
    assert kind.to_plain(value) == plain
    assert repr(kind.from_plain(plain)) == repr(value)
    assert pa.array([plain], type=kind.arrow(pa)).to_pylist() == [plain]


@pytest.mark.parametrize("annotation", [dict[str, int], tuple[int, str], float | None, bytearray])
def test_field_without_a_column_fails_at_import(annotation: Any) -> None:
    with pytest.raises(TypeError):
        kinds.kind_of(annotation)


PARAMS = data.to_columns([dataclasses.replace(SAMPLE, sampling_params=SamplingParams())])[
    "sampling_params"
][0]
BAD_VALUES: list[tuple[str, Any]] = [
    ("prompt_tokens", [1, 2.0]),
    ("prompt_tokens", [True]),
    ("prompt_tokens", None),
    ("prompt_tokens", "12"),
    ("logprobs", [-1.0, "x"]),
    ("logprobs", [False]),
    ("logprobs", [10**400]),
    ("weight_version", None),
    ("weight_version", 1.0),
    ("finish_reason", "eos"),
    ("stop_reason", "eos"),
    ("stop_reason", {"int": 1, "str": "x"}),
    ("stop_reason", {"int": 1}),
    ("stop_reason", {"int": "x", "str": None}),
    ("weight_versions", [{"version": 1, "start": 0}]),
    ("weight_versions", [[1, 0, 2]]),
    ("sampling_mask", {"offsets": [0], "token_ids": [1], "more": 1}),
    ("numerics", 7),
    ("loss_mask", [1]),
    ("kv_versions", [{"token_start": 0, "token_end": 1}]),
    ("kv_versions", [{"token_start": 0, "token_end": 1, "versions": [{"version": 1}]}]),
    ("sampling_params", {"temperature": 1.0}),
    ("sampling_params", PARAMS | {"temperature": None}),
    ("sampling_params", PARAMS | {"stop_token_ids": 5}),
    ("sampling_params", PARAMS | {"stop_token_ids": [5, 5]}),
    ("sampling_params", PARAMS | {"logit_bias": {"5": 1.0}}),
    ("sampling_params", PARAMS | {"logit_bias": [{"key": "5", "value": 1.0}]}),
    (
        "sampling_params",
        PARAMS | {"logit_bias": [{"key": 5, "value": 1.0}, {"key": 5, "value": 2.0}]},
    ),
]


@pytest.mark.parametrize(("column", "value"), BAD_VALUES)
def test_value_of_another_type_is_reported_with_its_position(
    tmp_path: Path, column: str, value: Any
) -> None:
    good = data.to_columns([SAMPLE])
    row = {name: items[0] for name, items in good.items()}
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([json.dumps(row), "", json.dumps(row | {column: value}), ""]))
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 3, column '{column}': "):
        data.read_jsonl(path)
    with pytest.raises(DataError, match=rf"^row 1, column '{column}': "):
        data.from_columns(
            {
                name: [items[0], value if name == column else items[0]]
                for name, items in good.items()
            }
        )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"top_p": 0.0}, "top_p=0.0 must be a finite number"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer"),
        ({"logit_bias": [{"key": 3, "value": None}]}, r"logit_bias\[3\]=nan"),
        ({"stop_token_ids": [-1]}, "stop_token_ids entry=-1"),
        ({"min_tokens": 999}, "min_tokens=999 exceeds max_tokens="),
    ],
)
def test_self_validating_record_reports_its_error(changes: dict[str, Any], problem: str) -> None:
    columns = data.to_columns([SAMPLE]) | {"sampling_params": [PARAMS | changes]}
    with pytest.raises(DataError, match=f"^row 0, column 'sampling_params': {problem}"):
        data.from_columns(columns)


def test_bad_parquet_value_is_reported_with_its_position(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    columns = data.to_columns([SAMPLE, SAMPLE]) | {"finish_reason": ["stop", "eos"]}
    pyarrow.parquet.write_table(pa.table(columns), path)
    with pytest.raises(
        DataError, match=r"bad\.parquet, row 1, column 'finish_reason': 'eos' is not one of"
    ):
        data.read_parquet(path)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "null",
        '{"logprobs": [NaN]}',
        "[" * 100_000,
        '"\udc80"',
        "1" * 5000,
        '{"a": 1} {"a": 1}',
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    data.write_jsonl([SAMPLE], path)
    with path.open("ab") as file:
        file.write(line.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2 "):
        data.read_jsonl(path)


def test_columns_are_exactly_the_fields(tmp_path: Path) -> None:
    columns = data.to_columns([SAMPLE])
    row = {name: items[0] for name, items in columns.items()}
    (tmp_path / "more.jsonl").write_text(json.dumps(row | {"logprob": 1}))
    pyarrow.parquet.write_table(pa.table(columns | {"logprob": [1]}), tmp_path / "more.parquet")
    del row["seed"]
    (tmp_path / "less.jsonl").write_text(json.dumps(row))
    pyarrow.parquet.write_table(pa.table(columns).drop_columns(["seed"]), tmp_path / "less.parquet")
    for read, name in ((data.read_jsonl, "jsonl"), (data.read_parquet, "parquet")):
        position = f"{name}, line 1" if name == "jsonl" else name
        with pytest.raises(
            DataError, match=rf"more\.{position}: unknown column 'logprob'; did you mean 'logprobs'"
        ):
            read(tmp_path / f"more.{name}")
        with pytest.raises(DataError, match=rf"less\.{position}: column 'seed' is missing"):
            read(tmp_path / f"less.{name}")
    with pytest.raises(DataError, match=r"'logprobs' has 2 rows, but 'prompt_tokens' has 1"):
        data.from_columns(columns | {"logprobs": [(), ()]})


def test_files_of_older_releases_have_no_groups(tmp_path: Path) -> None:
    columns = data.to_columns([dataclasses.replace(SAMPLE, group_id=3)])
    assert columns.pop("group_id") == [3]
    (tmp_path / "old.jsonl").write_text(
        json.dumps({name: each[0] for name, each in columns.items()})
    )
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "old.parquet")
    for read in (data.read_jsonl, data.read_parquet):
        assert read(tmp_path / f"old.{read.__name__.removeprefix('read_')}") == [SAMPLE]


def test_files_of_older_releases_lack_parameters(tmp_path: Path) -> None:
    sample = dataclasses.replace(SAMPLE, sampling_params=SamplingParams(top_k=3))
    columns = data.to_columns([sample])
    row = {name: each[0] for name, each in columns.items()}
    del row["sampling_params"]["bad_words"], row["sampling_params"]["thinking_token_budget"]
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    assert data.read_jsonl(tmp_path / "old.jsonl") == [sample]
    del row["sampling_params"]["temperature"]
    (tmp_path / "less.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match="is not an object with temperature"):
        data.read_jsonl(tmp_path / "less.jsonl")


def test_corrupt_files_are_rejected(tmp_path: Path) -> None:
    for content in (b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"{}\n"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError, match="a is not a readable Parquet file"):
            data.read_parquet(tmp_path / "a")
    for read in (data.read_jsonl, data.read_parquet):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")


@pytest.mark.parametrize(
    ("field", "value"), [("weight_version", 2**63), ("seed", -1), ("numerics", "\ud800")]
)
def test_value_that_exceeds_its_column_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"column '{field}' cannot be written to .*a.parquet"):
        data.write_parquet([dataclasses.replace(SAMPLE, **{field: value})], tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()


def test_missing_pyarrow_error_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for act in (
        lambda: data.write_parquet([SAMPLE], tmp_path / "a"),
        lambda: data.read_parquet(tmp_path / "a"),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'nano-inference\[data\]'"):
            act()
    data.write_jsonl([SAMPLE], tmp_path / "a")
    assert data.read_jsonl(tmp_path / "a") == [SAMPLE]


def test_error_is_a_value_error() -> None:
    assert issubclass(DataError, NanoInferenceError)
    assert issubclass(DataError, ValueError)


TOKENS = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)


@st.composite
def aligned(draw: st.DrawFn) -> TrainingSample:
    """Return a sample with one value per token."""
    completion = draw(TOKENS)
    length = len(completion)
    numbers = st.lists(st.floats(width=32, allow_nan=False), min_size=length, max_size=length).map(
        tuple
    )
    cut = draw(st.integers(0, length))
    versions = [VersionSpan(3, 0, cut), VersionSpan(2**40, cut, length)]
    return TrainingSample(
        prompt_tokens=draw(TOKENS),
        completion_tokens=completion,
        logprobs=draw(numbers),
        ref_logprobs=draw(st.none() | numbers),
        weight_version=7,
        finish_reason="length",
        weight_versions=draw(
            st.sampled_from([(), tuple(span for span in versions if span.start < span.end)])
        ),
        raw_logprobs=draw(st.none() | numbers),
        loss_mask=draw(
            st.just(()) | st.lists(st.booleans(), min_size=length, max_size=length).map(tuple)
        ),
    )


@pytest.mark.thorough
@settings(max_examples=at_depth(150), deadline=None)
@given(
    samples=st.lists(aligned(), max_size=4),
    prompt_side=st.sampled_from(["left", "right"]),
    max_length=st.none() | st.integers(6, 11),
)
def test_pad_fills_rows(
    samples: list[TrainingSample], prompt_side: Any, max_length: int | None
) -> None:
    pad = 9
    batch = data.pad_samples(samples, pad, prompt_side=prompt_side, max_length=max_length)
    prompt_width = max((len(sample.prompt_tokens) for sample in samples), default=0)
    kept = []
    for sample in samples:
        begin = prompt_width if prompt_side == "left" else len(sample.prompt_tokens)
        kept.append(min(len(sample.completion_tokens), (max_length or 100) - begin))
    assert batch["prompt_lengths"].tolist() == [len(sample.prompt_tokens) for sample in samples]
    assert batch["completion_lengths"].tolist() == kept
    width = batch["input_ids"].shape[1]
    assert max_length is None or width <= max_length
    asked = ["logprobs", "ref_logprobs", "raw_logprobs", "log_kept_mass"]
    there = [name for name in asked if all(getattr(sample, name) is not None for sample in samples)]
    assert [name for name in asked if name in batch] == there
    ends = []
    for row, sample in enumerate(samples):
        prompt, length = len(sample.prompt_tokens), kept[row]
        first = prompt_width - prompt if prompt_side == "left" else 0
        rest = width - first - prompt - length
        ends.append(first + prompt + length)

        def cells(
            before: Any,
            prompt_cells: list[Any],
            cells: list[Any],
            first: int = first,
            rest: int = rest,
        ) -> Any:
            return [before] * first + prompt_cells + cells + [before] * rest

        versions = [7] * len(sample.completion_tokens)
        for span in sample.weight_versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        expected = {
            "input_ids": cells(pad, [*sample.prompt_tokens], [*sample.completion_tokens[:length]]),
            "attention_mask": cells(False, [True] * prompt, [True] * length),
            "completion_mask": cells(False, [False] * prompt, [True] * length),
            "loss_mask": cells(
                False, [False] * prompt, [*(sample.loss_mask or [True] * length)[:length]]
            ),
            "position_ids": cells(0, [*range(prompt)], [*range(prompt, prompt + length)]),
            "weight_versions": cells(-1, [-1] * prompt, versions[:length]),
            **{
                name: cells(0.0, [0.0] * prompt, [*getattr(sample, name)[:length]])
                for name in there
            },
        }
        assert {name: batch[name][row].tolist() for name in expected} == expected
    if prompt_side == "left":
        assert not batch["completion_mask"][:, :prompt_width].any()
    assert width == max(ends, default=0)


def test_tensors_have_their_documented_types_and_shapes() -> None:
    for samples in ([], [SAMPLE, SAMPLE]):
        batch = data.pad_samples(samples, 0)
        wide = {name for name, tensor in batch.items() if tensor.dim() == 2}
        assert all(batch[name].shape == (len(samples), 5 if samples else 0) for name in wide)
        assert {
            name: tensor.dtype for name, tensor in batch.items() if name.endswith("_lengths")
        } == {
            "prompt_lengths": torch.int64,
            "completion_lengths": torch.int64,
        }
        assert {batch[name].dtype for name in ("input_ids", "position_ids", "weight_versions")} == {
            torch.int64
        }
        assert {
            batch[name].dtype for name in ("attention_mask", "completion_mask", "loss_mask")
        } == {torch.bool}
        assert batch["logprobs"].dtype == torch.float32


@pytest.mark.parametrize("prompt_side", ["left", "right"])
def test_prompts_are_never_truncated(prompt_side: Any) -> None:
    long = dataclasses.replace(SAMPLE, prompt_tokens=(1, 2, 3, 4))
    with pytest.raises(
        DataError, match=r"max_length=4 leaves no room .* 4 prompt tokens of sample 1"
    ):
        data.pad_samples([SAMPLE, long], 0, prompt_side=prompt_side, max_length=4)
    assert data.pad_samples([SAMPLE, long], 0, prompt_side=prompt_side, max_length=5)[
        "input_ids"
    ].shape == (2, 5)


def test_per_token_values_must_match_the_token_count() -> None:
    samples = [
        dataclasses.replace(SAMPLE, ref_logprobs=numbers) for numbers in ((-1.0, -1.0), (-1.0,))
    ]
    with pytest.raises(DataError, match="sample 1 has 1 ref_logprobs for 2 completion tokens"):
        data.pad_samples(samples, 0)
    with pytest.raises(DataError, match="sample 0 has 1 loss_mask for 2 completion tokens"):
        data.pad_samples([dataclasses.replace(SAMPLE, loss_mask=(True,))], 0)
    with pytest.raises(DataError, match="prompt_side='top'"):
        data.pad_samples([SAMPLE], 0, prompt_side="top")

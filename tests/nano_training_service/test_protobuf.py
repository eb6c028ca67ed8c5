"""The wire format against bytes that the client's own library wrote."""

import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_training_service.errors import Refused
from nano_training_service.protobuf import (
    MESSAGES,
    MOST_VALUES,
    REACHED_LENGTH,
    STOPPED,
    forward_backward_output,
    forward_backward_request,
    sample_response,
    sampled_sequence,
    top_logprobs,
)

REQUEST = bytes.fromhex(
    "0a0572756e3a3110071a670a100a0e0a0c01000000020000002c01000012210a0a616476616e746167657312130a0c"
    "0000003f000080bf00000000180122010312300a0d7461726765745f746f6b656e73121f0a1802000000000000002c"
    "0100000000000004000000000000001802220103220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c64"
    "11cdccccccccccec3f30013a1f0a12636c69705f6c6f775f7468726573686f6c64120909cdccccccccccec3f"
)
IMAGE = REQUEST.replace(
    bytes.fromhex("1a670a100a0e0a0c01000000020000002c010000"),
    bytes.fromhex("1a6e0a100a0e0a0c01000000020000002c0100000a0512030a0178"),
)
# targets and weights of shape [4, 3], which the client writes as compressed sparse rows
SPARSE = bytes.fromhex(
    "0a0572756e3a3110071aea010a140a120a1001000000020000002c0100000400000012770a0d7461726765745f746f"
    "6b656e731266125e0a18050000000000000007000000000000002c0100000000000012280000000000000000000000"
    "00000000000100000000000000010000000000000003000000000000001a1801000000000000000000000000000000"
    "020000000000000018022202040312590a0777656967687473124e12460a080000003f0000803e1228000000000000"
    "000000000000000000000000000000000000000000000000000002000000000000001a100000000000000000020000"
    "0000000000180122020403220d63726f73735f656e74726f7079"
)
# two datums of shape [2], [1, 3] and [1, 3]: two records
COLUMNS = (
    "0a0b41727261795265636f7264123b0a0b41727261795265636f7264122a0a086c6f6770726f6273121e0a08000080"
    "bf000000c01210000000000000000008000000000000001801180112560a0b41727261795265636f726412450a086c"
    "6f6770726f627312390a18000040c0000080c00000a0c00000c0c00000e0c0000000c1121800000000000000000c00"
    "0000000000001800000000000000180122010318021a130a086c6f73733a73756d110000000000001840"
)
OUTPUT = (
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080"
    "bf000000c0000040c01218000000000000000008000000000000000c00000000000000180118021a130a086c6f7373"
    "3a73756d110000000000001840"
)
SAMPLE = (
    "0a160801120805000000060000001a08000000bf000080be0a021a0012080000c07f000080bf1a280a100000000000"
    "00000005000000060000001210804fc3c7804fc3c7000080bf000000c01802200220ac02"
)


def test_request_of_the_client_is_read() -> None:
    read = forward_backward_request(REQUEST)
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == (
        "run:1",
        7,
        "ppo",
        True,
    )
    assert read.loss_fn_config == {"clip_low_threshold": 0.9}
    (datum,) = read.data
    assert datum.tokens == (1, 2, 300)
    assert datum.inputs["target_tokens"].tolist() == [2, 300, 4]
    assert datum.inputs["advantages"].dtype == np.float32
    assert datum.inputs["advantages"].tolist() == [0.5, -1.0, 0.0]


def test_results_are_the_bytes_that_the_clients_library_writes() -> None:
    arrays = [np.array([-1, -2], np.float32), np.array([-3], np.float32)]
    output = forward_backward_output({"logprobs": arrays}, {"loss:sum": 6.0})
    assert output.hex() == OUTPUT
    tops = top_logprobs([((), ()), ((5, 6), (-1.0, -2.0))], 2)
    sequences = [
        sampled_sequence(REACHED_LENGTH, (5, 6), (-0.5, -0.25)),
        sampled_sequence(STOPPED, (), ()),
    ]
    prompt = np.array([np.nan, -1.0], np.float32)
    assert sample_response(sequences, prompt, tops, 300).hex() == SAMPLE


def test_sparse_tensors_of_the_client_are_read() -> None:
    read = forward_backward_request(SPARSE)
    assert read.refusal is None
    (datum,) = read.data
    assert datum.inputs["target_tokens"].tolist() == [[0, 0, 0], [0, 5, 0], [0, 0, 0], [7, 0, 300]]
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["weights"].tolist() == [[0, 0, 0]] * 3 + [[0.5, 0, 0.25]]


def _sparse(shape: list[int], values: list[float], ends: list[int], columns: list[int]) -> bytes:
    """Return a datum with sparse weights."""
    rows = {
        "values": np.array(values, "<f4").tobytes(),
        "ends": np.array(ends, "<i8").tobytes(),
        "columns": np.array(columns, "<i8").tobytes(),
    }
    tensor = {"sparse": rows, "dtype": 1, "shape": shape}
    datum = {"inputs": [{"key": "weights", "value": tensor}]}
    return MESSAGES["Request"](data=[datum]).SerializeToString()


@pytest.mark.parametrize(
    ("shape", "values", "ends", "columns", "words"),
    [
        ([2], [1], [0, 1, 1], [0], "must have two dimensions"),
        ([2, 3], [1], [0, 1], [0], "do not match"),
        ([2, 3], [1], [0, 2, 1], [0], "do not match"),
        ([2, 3], [1], [1, 1, 1], [0], "do not match"),
        ([2, 3], [1, 2], [0, 1, 1], [0, 1], "do not match"),
        ([2, 3], [1], [0, 1, 1], [3], "do not match"),
        ([2, 3], [1], [0, 1, 1], [-1], "do not match"),
        ([2, 3], [1], [0, 1, 1], [], "do not match"),
        ([1, 2**30], [1], [0, 1], [0], "more than 16777216 values"),
        ([0, 2**30], [], [0], [], "more than 16777216 values"),
        ([2, 3, 4], [1], [0, 1, 1], [0], r"has shape \[2, 3, 4\]"),
        ([2, 2**40], [1], [0, 1, 1], [0], "has shape"),
    ],
)
def test_sparse_tensors_that_do_not_fit_are_rejected(
    shape: list[int], values: list[float], ends: list[int], columns: list[int], words: str
) -> None:
    read = forward_backward_request(_sparse(shape, values, ends, columns))
    assert re.search(words, str(read.refusal))


def test_values_of_all_sparse_tensors_are_bounded_together() -> None:
    half = _sparse([1, MOST_VALUES // 2], [1], [0, 1], [0])
    assert forward_backward_request(half * 2).refusal is None
    assert "more than" in str(forward_backward_request(half * 3).refusal)


def test_logprobs_of_several_targets_are_readable_by_the_client() -> None:
    arrays = [np.array([-1, -2]), np.array([[-3, -4, -5]]), np.array([[-6, -7, -8]])]
    output = forward_backward_output(
        {"logprobs": [each.astype(np.float32) for each in arrays]}, {"loss:sum": 6.0}
    )
    assert output.hex() == COLUMNS


def test_image_is_rejected_with_its_known_position() -> None:
    read = forward_backward_request(IMAGE)
    assert read.seq_id == 7
    assert read.data == ()
    assert "image chunk" in str(read.refusal)


def test_request_that_ends_within_a_field_is_refused() -> None:
    refused = 0
    for length in range(1, len(REQUEST)):
        try:
            refused += forward_backward_request(REQUEST[:length]).refusal is not None
        except Refused:
            refused += 1
    assert refused == len(REQUEST) - 1 - 6  # it may end after each of its seven fields


def test_forward_backward_request_rejects_a_truncated_shape() -> None:
    # Request.data, Datum.inputs, Input.value, Tensor.shape: one byte whose varint continues
    body = bytes.fromhex("1a0712051203220180")
    with pytest.raises(Refused, match="not a valid Protocol Buffers message"):
        forward_backward_request(body)


def test_forward_backward_request_rejects_a_non_utf8_name() -> None:
    with pytest.raises(Refused, match="not a valid Protocol Buffers message"):
        forward_backward_request(b"\x0a\x01\xff")


def test_forward_backward_request_reads_settings_of_both_kinds() -> None:
    settings = [
        {"key": "clip", "value": {"number": 0.5}},
        {"key": "mode", "value": {"text": "mean"}},
        {"key": "none", "value": {}},
    ]
    body = MESSAGES["Request"](numbers=[{"key": "clip", "value": 0.25}], settings=settings)
    read = forward_backward_request(body.SerializeToString())
    assert read.loss_fn_config == {"clip": 0.5, "mode": "mean", "none": 0.0}


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_documented_errors(body: bytes) -> None:
    with suppress(Refused):
        forward_backward_request(body)


@given(st.binary(max_size=60), st.integers(0, len(SPARSE)), st.sampled_from([REQUEST, SPARSE]))
def test_arbitrary_bytes_in_a_request_raise_documented_errors(
    garbage: bytes, place: int, whole: bytes
) -> None:
    with suppress(Refused):
        forward_backward_request(whole[:place] + garbage + whole[place + len(garbage) :])

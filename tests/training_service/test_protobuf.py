"""The wire format, against bytes that the client's own library wrote."""

from contextlib import suppress

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.training_service.errors import Refused
from nano_inference.training_service.protobuf import (
    REACHED_LENGTH,
    STOPPED,
    _put,
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
OUTPUT = (
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080"
    "bf000000c0000040c01218000000000000000008000000000000000c00000000000000180118021a130a086c6f7373"
    "3a73756d110000000000001840"
)
SAMPLE = (
    "0a160801120805000000060000001a08000000bf000080be0a021a0012080000c07f000080bf1a280a100000000000"
    "00000005000000060000001210804fc3c7804fc3c7000080bf000000c01802200220ac02"
)


def test_a_request_of_the_client_is_read() -> None:
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


def test_an_image_is_refused_with_the_place_in_the_order_known() -> None:
    read = forward_backward_request(IMAGE)
    assert read.seq_id == 7
    assert read.data == ()
    assert "image chunk" in str(read.refusal)


def test_a_request_that_ends_within_a_field_is_refused() -> None:
    refused = 0
    for length in range(1, len(REQUEST)):
        try:
            refused += forward_backward_request(REQUEST[:length]).refusal is not None
        except Refused:
            refused += 1
    assert refused == len(REQUEST) - 1 - 6  # it may end behind each of its seven fields


def test_a_shape_that_ends_within_a_number_is_refused() -> None:
    tensor = _put(1, bytes(4)) + _put(3, 1) + _put(4, b"\x80")
    body = _put(3, _put(2, _put(1, "weights") + _put(2, tensor)))
    assert "no whole" in str(forward_backward_request(body).refusal)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    with suppress(Refused):
        forward_backward_request(body)


@given(st.binary(max_size=60), st.integers(0, len(REQUEST)))
def test_nor_do_bytes_within_a_request(garbage: bytes, place: int) -> None:
    with suppress(Refused):
        forward_backward_request(REQUEST[:place] + garbage + REQUEST[place + len(garbage) :])

"""The package `vllm` of shim/: the names that TRL imports, and whole updates of a server."""

import subprocess
import sys
from pathlib import Path

import pytest

from nano_inference.server.main import running_server
from tests.server.trainers.conftest import RL, engine_config
from tests.server.trainers.conftest import tiny_folder as tiny_folder
from tests.server.trainers.group_trainer import new_weights
from tests.server.trainers.sglang_trainer import checksums, checksums_of, version
from tests.shim.running import script, with_shim

UPDATE = Path(__file__).with_name("update.py")


def printed(source: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", source], env=with_shim(), capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


@pytest.mark.thorough
def test_shim_has_the_names_that_trl_imports() -> None:
    source = """
from vllm import LLM, RequestOutput, SamplingParams, __version__
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.network_utils import get_ip, get_open_port
for kind in (LLM, RequestOutput, SamplingParams, StructuredOutputsParams):
    try:
        kind("model")
    except ImportError as problem:
        assert kind.__name__ in str(problem)
    else:
        raise AssertionError(kind)
assert get_ip() and get_open_port()
print(__version__)
"""
    assert printed(source) == "0.31.0"


@pytest.mark.thorough
def test_shim_reads_no_object() -> None:
    """Only a pickle could bring one."""
    source = """
from vllm.distributed.utils import StatelessProcessGroup
group = StatelessProcessGroup(1, 2, None)
try:
    group.broadcast_obj(None, src=0)
except RuntimeError as problem:
    print(problem)
"""
    assert "since it is a pickle" in printed(source)


@pytest.mark.thorough
def test_shim_updates_a_server(tiny_folder: Path) -> None:
    with (
        running_server(engine_config(tiny_folder), RL) as url,
        script(UPDATE, url, tiny_folder) as trainer,
    ):
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        for seed in (1, 2):
            assert trainer.stdout.readline().strip() == f"sent {seed}"
            assert checksums(url) == checksums_of(new_weights(tiny_folder, seed))
            assert version(url) == f"seed {seed}"
            print(file=trainer.stdin, flush=True)
        assert trainer.wait(60) == 0

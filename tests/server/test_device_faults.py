"""A device fault in the engine's process: requests fail with the reason, and `/health` reports
dead.
"""

import asyncio
import os
from pathlib import Path

import pytest

from nano_inference.errors import EngineDead
from nano_inference.remote.process_client import ProcessClient
from nano_inference.server.errors import api_error_of
from nano_inference.server.http.admission import Readiness
from tests.server.engines import PATIENCE, child_of, config_of, finished, params_of, until

# Python runs this at the start of the engine's process: its device fails in the fifth step and in
# all later ones.
BROKEN = """
import sys
if any(arg.endswith("engine_process") for arg in sys.orig_argv):
    import torch
    from nano_inference.device import runner
    steps = 0
    whole, waited = runner.ModelRunner.forward, runner.Sampled.wait
    def fail():
        {fault}
    def forward(self, *args):
        global steps
        steps += 1
        if steps > 5:
            fail()
        return whole(self, *args)
    def wait(self):
        if steps >= 5:
            fail()
        return waited(self)
    runner.ModelRunner.forward = forward
    if "{where}" == "wait":
        runner.Sampled.wait = wait
"""
FAULTS = {
    "access": 'raise torch.AcceleratorError("CUDA error: an illegal memory access was '
    'encountered")',
    "memory": 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")',
    "bug": 'raise KeyError("/secret/of/another/client")',
}
TOLD = {
    "access": "can no longer use: AcceleratorError: CUDA error: an illegal memory access",
    "memory": "lower gpu_memory_utilization from 0.9 to 0.85 or max_tokens_per_batch from 8192 to "
    "4096",
    "bug": "a step failed: KeyError",
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "where"), [("access", "wait"), ("memory", "forward"), ("bug", "forward")]
)
def test_requests_get_the_device_fault_and_health_says_dead(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, where: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(fault=FAULTS[fault], where=where))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )

    async def test() -> None:
        client = ProcessClient(config_of(model), 4096)
        lifecycle = Readiness(client)
        await asyncio.wait_for(client.start(), 2 * PATIENCE)
        lifecycle.is_ready = True
        assert lifecycle.status == "ok"
        child = child_of(client)
        streams = [
            client.submit([1, seed], params_of(seed, 400), 2, stream=True) for seed in range(3)
        ]
        pause = asyncio.create_task(client.call("pause", mode="wait"))
        for stream in streams:
            with pytest.raises(EngineDead) as lost:
                await finished(stream)
            told = api_error_of(lost.value)
            assert told.status == 503
            assert TOLD[fault] in told.message
            assert "secret" not in told.message
        with pytest.raises(EngineDead):
            await asyncio.wait_for(pause, PATIENCE)
        assert TOLD[fault] in str(client.why_dead)
        assert TOLD[fault] in client.public_reason
        assert ("secret" in str(client.why_dead)) == (fault == "bug"), (
            "whoever runs the server is told all"
        )
        await until(lambda: lifecycle.status == "dead")
        await until(lambda: not child.folder.exists())  # the process has ended by itself
        assert client.num_samples == 0
        await asyncio.wait_for(client.close(), PATIENCE)

    asyncio.run(asyncio.wait_for(test(), 120))

"""Speed of updates of a live model: in process against a copy of their bytes, by gloo against a
bare broadcast.

The functions return seconds, measured in turns. `python -m benchmarks.weight_transfer` prints their
minima.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.models.decoder import Decoder
from nano_inference.models.parameters.slots import slots
from nano_inference.models.parameters.table import param_table
from nano_inference.models.parameters.values import read
from nano_inference.weights.sources import BUCKET_BYTES
from nano_inference.weights.sync import WeightSyncManager
from nano_inference.weights.transports import receive_update
from nano_inference.weights.transports.broadcast import BroadcastReceiver
from nano_inference.weights.transports.sender import WeightSender

MODEL = "smollm2-135m"
Seconds = dict[str, list[float]]


def state_dict(model: Decoder) -> dict[str, Tensor]:
    """Return copies of a model's weights under checkpoint names."""
    return {
        name: read(model.params, slot).clone()
        for name, slot in slots(param_table(model.spec)).items()
    }


def copy_and_update(engine: InferenceEngine, weights: dict[str, Tensor], runs: int = 20) -> Seconds:
    """Return the seconds of one copy of the weights' bytes in memory, and of a blocking update with
    them.
    """
    whole = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
    target = torch.empty_like(whole).copy_(whole)
    seconds: Seconds = {"copy": [], "update": []}
    for _ in range(runs):
        with _timed(seconds["copy"]):
            target.copy_(whole)
        with _timed(seconds["update"]):
            engine.update_weights(weights, blocking=True)
    return seconds


def broadcast_and_send(
    manager: WeightSyncManager, runs: int = 10, bucket_bytes: int = BUCKET_BYTES
) -> Seconds:
    """Return the seconds of a bare `dist.broadcast` of the weights' bytes, and of a received and
    staged update, both by gloo.

    A second process sends ones in the weights' shapes and dtype. Nothing is written into the model.
    """
    shapes = {name: list(shape) for name, shape in manager.shapes.items()}
    dtype = str(manager.model.dtype).removeprefix("torch.")
    command = [
        sys.executable,
        "-m",
        "benchmarks.weight_transfer",
        "--send",
        json.dumps([shapes, dtype, runs, bucket_bytes]),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        bare, address = json.loads(child.stdout.readline())
        dist.init_process_group("gloo", init_method=bare, rank=1, world_size=2)
        receiver = BroadcastReceiver(address)
        seconds = _receive_all(manager, receiver, shapes, runs)
        dist.destroy_process_group()
        receiver.close()
        child.wait(60)
    finally:
        child.kill()
        child.communicate()
    return seconds


def _receive_all(
    manager: WeightSyncManager, receiver: BroadcastReceiver, shapes: dict[str, list[int]], runs: int
) -> Seconds:
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    target = torch.zeros(count, dtype=manager.model.dtype)
    seconds: Seconds = {"broadcast": [], "update": []}
    for run in range(runs + 1):  # the first one creates the group
        dist.barrier()
        kept = seconds if run else {"broadcast": [], "update": []}
        with _timed(kept["broadcast"]):
            dist.broadcast(target, 0)
        dist.barrier()
        with _timed(kept["update"]):
            update = receive_update(manager, receiver, timeout=60)
            while not manager.pending:
                if update.done():
                    update.result()
                time.sleep(2e-4)
        manager.pending.clear()
    return seconds


def _send_all(shapes: dict[str, list[int]], dtype: str, runs: int, bucket_bytes: int) -> None:
    torch.set_num_threads(1)
    whole = torch.ones(
        sum(torch.Size(shape).numel() for shape in shapes.values()), dtype=getattr(torch, dtype)
    )
    pieces = whole.split([torch.Size(shape).numel() for shape in shapes.values()])
    weights = {
        name: piece.clone().view(shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
    probe = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    bare = f"tcp://127.0.0.1:{probe.port}"
    del probe
    with WeightSender(bucket_bytes=bucket_bytes, timeout=60) as sender:
        print(json.dumps([bare, sender.address]), flush=True)
        dist.init_process_group("gloo", init_method=bare, rank=0, world_size=2)
        for _ in range(runs + 1):
            dist.barrier()
            dist.broadcast(whole, 0)
            dist.barrier()
            sender.send(weights)
        dist.destroy_process_group()


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


def main() -> None:
    """Measure both and print the minima."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--send", help="arguments of the second process, as JSON")
    arguments = parser.parse_args()
    if arguments.send:
        _send_all(*json.loads(arguments.send))
        return
    config: dict[str, Any] = {
        "model_path": MODEL,
        "num_threads": 2,
        "dtype": "bfloat16",
        "kv_cache_memory": 2**26,
    }
    with InferenceEngine(EngineConfig(**config)) as engine:
        weights = state_dict(engine.model)
        size = sum(tensor.nbytes for tensor in weights.values())
        for seconds in (
            copy_and_update(engine, weights),
            broadcast_and_send(WeightSyncManager(engine.model)),
        ):
            base, ours = (min(each) for each in seconds.values())
            print(
                f"{size / 1e6:.0f} MB: {dict(zip(seconds, (base, ours), strict=True))}, ratio "
                f"{ours / base:.2f}"
            )


if __name__ == "__main__":
    main()

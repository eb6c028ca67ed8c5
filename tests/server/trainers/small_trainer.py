"""A trainer like PipelineRL or prime-rl in a separate process, at the other end of a gloo group.

Run as `python -m tests.server.trainers.small_trainer KIND URL PORT WORLD_SIZE`, with the port of
its store. It prints `joined`, then executes lines of stdin, each `ACTION VERSION`, and answers each
with a line: a status and a reply.
"""

import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import torch
import torch.distributed as dist

from nano_inference.errors import WeightUpdateError
from nano_inference.weights.transports.sender import WeightSender
from tests.models.tiny import llama_config, llama_weights

CONFIG = llama_config()
PATIENCE = 20.0


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return a version's weights: random and different for each version."""
    return llama_weights(CONFIG, seed=version)


def post(url: str, path: str, body: object) -> str:
    reply = httpx.post(url + path, json=body, timeout=2 * PATIENCE)
    return f"{reply.status_code} {json.dumps(reply.json())}"


def pipeline(url: str, action: str, version: int) -> str:
    """Announce the tensors, then broadcast them one by one."""
    tensors = weights(version)
    infos = [
        {"name": name, "shape": list(t.shape), "dtype": str(t.dtype)} for name, t in tensors.items()
    ]
    if action == "misnamed":
        infos[3]["name"] = "no.such.tensor"
    if action == "misshapen":
        infos[-1]["shape"] = [7]
    request = {
        "kind": "weight_update_request",
        "version": version,
        "timestamp": 1.0,
        "parameters_info": infos,
    }
    with ThreadPoolExecutor(1) as pool:
        if action == "beside":  # another client announces them
            answer = pool.submit(str, "sent")
        else:
            answer = pool.submit(post, url, "/receive_weight_update", request)
        for number, tensor in enumerate(tensors.values()):
            if action == "die" and number == 4:
                os._exit(9)
            try:
                dist.broadcast(tensor, 0)
            except RuntimeError:
                break  # the engine has left, and the reply gives the reason
        return answer.result()


def prime(url: str, action: str, version: int) -> str:
    """Name the folder of a step like prime-rl's orchestrator, and send from its trainer."""
    with ThreadPoolExecutor(1) as pool:
        folder = {
            "weight_dir": None if action == "unnamed" else f"/somewhere/broadcasts/step_{version}"
        }
        answer = pool.submit(post, url, "/update_weights", folder)
        try:
            if action == "pickles":
                send_pickled(weights(version))
            else:
                WeightSender.over(dist.group.WORLD, timeout=PATIENCE).send(weights(version))
        except (RuntimeError, WeightUpdateError):
            pass  # the engine has left, and the reply gives the reason
        return answer.result()


def send_pickled(tensors: dict[str, torch.Tensor]) -> None:
    """Send in prime-rl's format: the number of dicts, the length of a pickled description, the
    description, and a tensor of all numbers.
    """
    described = pickle.dumps(
        {torch.float32: [(name, t.shape, t.numel()) for name, t in tensors.items()]}
    )
    for tensor in (
        torch.tensor([1]),
        torch.tensor([len(described)]),
        torch.frombuffer(bytearray(described), dtype=torch.uint8),
        torch.cat([t.flatten() for t in tensors.values()]),
    ):
        dist.broadcast(tensor, 0)


def main() -> None:
    """Join the group and execute orders."""
    torch.set_num_threads(1)
    kind, url, port, world_size = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=int(world_size),
        timeout=timedelta(seconds=PATIENCE),
    )
    print("joined", flush=True)
    for line in sys.stdin:
        action, version = line.split()
        print({"pipeline": pipeline, "prime": prime}[kind](url, action, int(version)), flush=True)


if __name__ == "__main__":
    main()

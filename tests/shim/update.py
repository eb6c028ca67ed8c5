"""A trainer of vLLM's dialect with the package of shim/: `python update.py URL FOLDER`. It sends
weights of two seeds, packed by the helpers of vLLM 0.28, and by the engine of earlier versions.
"""

import sys
import threading
from pathlib import Path
from typing import Any

import httpx
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerSendWeightsArgs,
    NCCLWeightTransferEngine,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.utils.network_utils import get_open_port

from tests.server.trainers.group_trainer import new_weights

URL, FOLDER = sys.argv[1], Path(sys.argv[2])


def post(path: str, body: Any) -> None:
    """Send a request."""
    httpx.post(URL + path, json=body, timeout=60).raise_for_status()


def beside(act: Any, *arguments: Any) -> Any:
    """Run a function on a thread, and return a function that waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act(*arguments)))
    thread.start()

    def result() -> Any:
        thread.join(60)
        return results[0]

    return result


def main() -> None:
    """Send both updates over one group."""
    address = {"master_address": "127.0.0.1", "master_port": get_open_port(), "world_size": 2}
    group = beside(trainer_init, address)
    packing = {"packed": True, "packed_buffer_size_bytes": 3000}
    post("/init_weight_transfer_engine", {"init_info": address | packing | {"rank_offset": 1}})
    group = group()
    for seed, is_packed in ((1, True), (2, False)):
        weights = new_weights(FOLDER, seed)
        info = {
            "names": list(weights),
            "dtype_names": ["float32"] * len(weights),
            "shapes": [list(each.shape) for each in weights.values()],
            "packed": is_packed,
        }
        if is_packed:
            send = beside(
                packed_nccl_broadcast_producer, weights.items(), group, 0, lambda item: item[1], 3000
            )  # fmt: skip
        else:
            arguments = NCCLTrainerSendWeightsArgs(group)
            send = beside(NCCLWeightTransferEngine.trainer_send_weights, weights.items(), arguments)
        post("/start_weight_update", {})
        post("/update_weights", {"update_info": info})
        send()
        post("/finish_weight_update", {"weight_version": f"seed {seed}"})
        print(f"sent {seed}", flush=True)
        sys.stdin.readline()
    group.group.store = None  # as TRL ends a group


if __name__ == "__main__":
    main()

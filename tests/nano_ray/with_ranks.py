"""Kill one actor of a replica of two ranks, whose actors run on one node.

Run by the interpreter of an environment with Ray. Arguments: a model folder, and a folder with
`whole.safetensors`. Prints one line of JSON.
"""
# pyright: reportMissingImports=false

import json
import sys
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file
from watching import PARAMS as LONG
from watching import PATIENCE, bits, config_of, say, serving, until

from nano_inference import InferenceEngine
from nano_inference.errors import EngineDead
from nano_ray import RayFleet

MODEL, WEIGHTS = sys.argv[1:]
CONFIG = config_of(MODEL)
PARAMS = replace(LONG, max_tokens=100)
PROMPTS = [[3 + index, 5, 6, 7, 8] for index in range(3)]


def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    whole = load_file(f"{WEIGHTS}/whole.safetensors")
    with InferenceEngine(CONFIG) as engine:
        quiet = [bits(engine.generate(PROMPTS, PARAMS, 2))]
        engine.update_weights(whole, blocking=True)
        checksum = engine.weights_checksum()
        quiet += [bits(engine.generate(PROMPTS, PARAMS, 2)) for _ in range(2)]
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, connect=True)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        say("cluster")
        try:
            RayFleet(CONFIG, 1, 2, patience=3)
        except EngineDead as problem:
            seen["apart"] = str(problem)
        cluster.add_node(num_cpus=2)
        with RayFleet(CONFIG, 1, 2, patience=PATIENCE) as fleet:
            say("fleet")
            seen["generate"] = bits(fleet.generate(PROMPTS, PARAMS, 2)) == quiet[0]
            seen["version"] = fleet.update_weights(whole)
            seen["checksum"] = fleet.weights_checksum() == checksum
            seen["updated"] = bits(fleet.generate(PROMPTS, PARAMS, 2)) == quiet[1]
            say("updated")
            (client,) = fleet._client.supervisor.living().values()
            raylet = psutil.Process(client.info.pid).parent()
            assert raylet is not None
            (rank,) = (
                each for each in raylet.children() if "RankActor" in " ".join(each.cmdline())
            )
            rank.kill()
            until("its end", lambda: not serving(fleet))
            seen["why"] = fleet.replicas()[0].why
            say("rank killed")
            until("a new one", lambda: serving(fleet))
            say("replaced")
            seen["again"] = bits(fleet.generate(PROMPTS, PARAMS, 2)) == quiet[2]
    finally:
        ray.shutdown()
        cluster.shutdown()
    say("end")
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))

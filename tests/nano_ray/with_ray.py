"""Kill and replace nodes of a fleet on a Ray cluster of three nodes on one machine.

Run by the interpreter of an environment with Ray. Arguments: a model folder, and a folder with
`whole.safetensors` and `part.safetensors`. Prints one line of JSON.
"""
# pyright: reportMissingImports=false

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file
from watching import (
    PARAMS,
    PATIENCE,
    PROMPTS,
    SEEDED,
    WIDTH,
    Meanwhile,
    bits,
    config_of,
    in_the_middle,
    say,
    serving,
    until,
)

from nano_inference import InferenceEngine, WeightUpdateError
from nano_inference.errors import ConfigError, EngineDead, InvalidRequest
from nano_ray import RayFleet

MODEL, WEIGHTS = sys.argv[1:]
CONFIG = config_of(MODEL)
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


def refusals(fleet: RayFleet) -> dict[str, str]:
    def said(call: Callable[[], Any], kind: type[Exception]) -> str:
        try:
            call()
        except kind as problem:
            return str(problem)
        return "nothing"

    whole = load_file(f"{WEIGHTS}/whole.safetensors")
    name = next(iter(whole))
    return {
        "shape": said(lambda: fleet.update_weights({name: whole[name][:3]}), WeightUpdateError),
        "none": said(lambda: fleet.update_weights({}), WeightUpdateError),
        "missing": said(
            lambda: fleet.update_weights({name: whole[name]}, complete=True), WeightUpdateError
        ),
        "old": said(lambda: fleet.update_weights(whole, version=1), WeightUpdateError),
        "text": said(lambda: fleet.generate(["text"], PARAMS), InvalidRequest),
        "ids": said(lambda: fleet.generate([[1, 2], [10**6]], PARAMS), InvalidRequest),
        "long": said(lambda: fleet.generate([[1, 2], [1] * 500], PARAMS), InvalidRequest),
        "all": said(lambda: fleet.remove_replicas(2), InvalidRequest),
        "tensor": said(lambda: RayFleet(CONFIG, 1, 3), ConfigError),
        "device": said(lambda: RayFleet(replace(CONFIG, device="cuda:1"), 1), ConfigError),
        "lockstep": said(lambda: RayFleet(replace(CONFIG, expert_parallel=2), 2), ConfigError),
        "room": said(lambda: RayFleet(CONFIG, 1, cpus_per_rank=64, patience=3), EngineDead),
    }


def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    whole, part = (load_file(f"{WEIGHTS}/{name}.safetensors") for name in ("whole", "part"))
    with InferenceEngine(CONFIG) as engine:  # reference without faults
        unseeded = engine.generate(PROMPTS[:6], PARAMS, WIDTH)
        engine.update_weights(whole, blocking=True)
        engine.update_weights(part, blocking=True)
        checksum = engine.weights_checksum()
        quiet = bits(engine.generate(PROMPTS, SEEDED, WIDTH))
    say("quiet")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH},
        connect=True,
    )
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(2))}
    say("cluster")
    fleet = RayFleet(CONFIG, 2, patience=PATIENCE)
    say("fleet")
    try:
        seen["nodes"] = {each.node for each in fleet.replicas()} == set(nodes)
        samples = fleet.generate(PROMPTS[:6], PARAMS, WIDTH)  # with the configuration's seeds
        seen["generate"] = bits(samples) == bits(unseeded)
        seen["ids"] = [each.request_id for each in samples] == [
            each.request_id for each in unseeded
        ]
        say("generated")
        seen["versions"] = [
            fleet.update_weights(whole),
            fleet.update_weights(part.items(), complete=False),
        ]
        seen["each version"] = [each.weight_version for each in fleet.replicas()]
        seen["checksum"] = fleet.weights_checksum() == checksum
        say("updated")
        seen["refused"] = refusals(fleet)
        seen["still"] = [fleet.get_weight_version(), fleet.weights_checksum() == checksum]
        say("refused")

        # Kill a node; another one replaces it.
        running = in_the_middle(fleet)
        victim = fleet.replicas()[1]
        cluster.remove_node(nodes[victim.node], allow_graceful=False)
        say("node killed")
        until("a dead replica", lambda: len(serving(fleet)) == 1)
        seen["in the middle"] = running.runs()
        seen["while dead"] = [(each.name, each.weight_version) for each in serving(fleet)]
        say("noticed")
        seen["killed"] = running.result() == quiet
        say("generated")
        new = cluster.add_node(num_cpus=1)
        until("a new replica", lambda: len(serving(fleet)) == 2)
        say("replaced")
        other = {each.name: each for each in fleet.replicas()}[victim.name]
        seen["replaced"] = [other.node == new.node_id, other.weight_version, other.num_starts]
        seen["checksum of the new one"] = fleet.weights_checksum() == checksum

        # Add and remove replicas during the call.
        cluster.add_node(num_cpus=1)
        added: list[tuple[str, ...]] = []
        again = []
        adding = Meanwhile(lambda: added.append(fleet.add_replicas(1)))
        while adding.runs():
            again.append(bits(fleet.generate(PROMPTS, SEEDED, WIDTH)) == quiet)
        adding.result()
        running = in_the_middle(fleet)
        seen["added"] = [list(added[0]), bool(again), all(again)]
        say("added")
        seen["three"] = [each.weight_version for each in serving(fleet)]
        seen["removed"] = [running.runs(), list(fleet.remove_replicas(2))]
        seen["elastic"] = [running.result() == quiet, len(fleet.replicas())]
        say("elastic")

        # Kill all replicas: the call waits for the first new one.
        running = in_the_middle(fleet)
        for client in fleet._client.supervisor.living().values():
            os.kill(client.info.pid, signal.SIGKILL)
        seen["all killed"] = running.result() == quiet
        seen["after all"] = [fleet.get_weight_version(), fleet.weights_checksum() == checksum]
        say("all killed")
        seen["next"] = fleet.update_weights(whole)
    finally:
        fleet.shutdown()
        seen["given back"] = ray.available_resources().get("CPU")
        ray.shutdown()
        cluster.shutdown()
    say("end")
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))

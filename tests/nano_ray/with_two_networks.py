"""Run a fleet over two networks while the route between them fails for a while.

Run by the interpreter of an environment with Ray, in the near network with Ray's head. Arguments: a
model folder, a folder with `whole.safetensors`, and the head's address. Prints "cut" and "mend" to
request these actions, and at the end one line of JSON.
"""

import json
import sys
import time
from typing import Any

from safetensors.torch import load_file
from watching import (
    PATIENCE,
    PROMPTS,
    SEEDED,
    WIDTH,
    bits,
    config_of,
    in_the_middle,
    say,
    serving,
    until,
)

from nano_inference import InferenceEngine
from nano_ray import RayFleet

MODEL, WEIGHTS, ADDRESS = sys.argv[1:]
CONFIG = config_of(MODEL)


def main() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    whole = load_file(f"{WEIGHTS}/whole.safetensors")
    with InferenceEngine(CONFIG) as engine:
        quiet = [bits(engine.generate(PROMPTS, SEEDED, WIDTH))]
        engine.update_weights(whole, blocking=True)
        quiet.append(bits(engine.generate(PROMPTS[:4], SEEDED[:4], WIDTH)))
    with RayFleet(CONFIG, 2, address=ADDRESS, patience=PATIENCE) as fleet:
        say("fleet")
        seen["nodes"] = len({each.node for each in fleet.replicas()})
        running = in_the_middle(fleet)
        print("cut", flush=True)
        began = time.monotonic()
        until("a lost replica", lambda: len(serving(fleet)) == 1)
        seen["noticed"] = time.monotonic() - began
        seen["running"] = running.runs()
        say("noticed")
        seen["cut"] = running.result() == quiet[0]
        say("generated")
        seen["version"] = fleet.update_weights(whole)
        print("mend", flush=True)
        until("both", lambda: len(serving(fleet)) == 2)
        say("both")
        seen["versions"] = [each.weight_version for each in fleet.replicas()]
        seen["nodes again"] = len({each.node for each in fleet.replicas()})
        seen["mended"] = bits(fleet.generate(PROMPTS[:4], SEEDED[:4], WIDTH)) == quiet[1]
    say("end")
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))

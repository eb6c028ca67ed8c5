"""The runs whose figures `docs/scale.md` has."""

from dataclasses import replace

from benchmarks.fleet.load import Load
from benchmarks.fleet.simulation import Row, Scenario, measure

BUSY = Load(rate=12.0)
KEYS = {"max_keys": 1 << 22}  # of a thousand replicas' conversations


def scenarios(replicas: int = 1000, requests: int = 2_000_000, seed: int = 0) -> list[Scenario]:
    """The whole fleet, the whole fleet with a loss, and then a tenth of it, to compare.

    Args:
        replicas: of the whole.
        requests: of the first run; the second has a tenth, the others a 25th.
        seed: of all.
    """
    first = Scenario("router", replicas, requests, router=KEYS, load=BUSY, seed=seed)
    tenth = max(2, replicas // 10)
    base = replace(first, name="a tenth: router", replicas=tenth, requests=requests // 25)
    slow = max(1, tenth // 100)
    return [
        first,
        replace(first, name="1 % lost", requests=requests // 10, lost=max(1, replicas // 100)),
        base,
        replace(base, name="a tenth: round robin", policy="round robin"),
        replace(base, name="a tenth: load alone", router={"piece_worth": 0}),
        replace(base, name="a tenth: sessions", sessions=True),
        replace(base, name="a tenth: few keys", router={"max_keys": 1 << 15}),
        replace(base, name="a tenth: 1 % slow", slow=slow),
        replace(base, name="a tenth: 1 % slow, round robin", slow=slow, policy="round robin"),
    ]


def run(chosen: list[Scenario]) -> list[Row]:
    """Measure them one after the other."""
    return [measure(scenario) | {"seed": scenario.seed} for scenario in chosen]

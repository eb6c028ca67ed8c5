"""`benchmarks.peers.ours_worker` with estimated step costs. On a busy machine, measured costs may
say that drafts do not pay.
"""

from benchmarks.peers import ours_worker
from nano_inference.drafts.sources import GUESSED
from nano_inference.engine import engine


def main() -> None:
    engine.measure_costs = lambda *_: GUESSED
    ours_worker.main()


if __name__ == "__main__":
    main()

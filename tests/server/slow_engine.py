"""The engine process with an engine whose long requests last: see `standing.slowed`."""

from typing import Any

from nano_inference.remote import engine_process
from nano_inference.remote.messages import Begin
from tests.standing import slowed


def main() -> None:
    """Run `engine_process.main` with a slow engine."""
    build = engine_process._build

    def build_slow(begin: Begin) -> Any:
        from nano_inference.core.loop import EngineLoop

        EngineLoop.step = slowed(EngineLoop.step)  # pyright: ignore
        return build(begin)

    engine_process._build = build_slow
    engine_process.main()


if __name__ == "__main__":
    main()

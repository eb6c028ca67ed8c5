"""A server of a scripted engine in a separate process.

Run as `python -m tests.server.serve_scripted '{"script": ...}'`. Keys: `script` and `config`
(arguments of `Script` and `ServerConfig`), `start` (a file: the engine is built once it exists, and
fails to build if it is empty), `linger`.
"""

import asyncio
import json
import sys
from pathlib import Path

from nano_inference.errors import ModelLoadError, NanoInferenceError
from nano_inference.server import server
from nano_inference.server.config import ServerConfig
from nano_inference.server.main import serve
from tests.server.scripted import Script, ScriptedClient


class Slow(ScriptedClient):
    file: Path | None = None

    async def start(self) -> None:
        while self.file is not None and not self.file.exists():
            await asyncio.sleep(0.01)
        if self.file is not None and not self.file.stat().st_size:
            raise ModelLoadError("there is no such model.")
        await super().start()


def main(options: dict) -> None:
    options = {"config": {}, **options}
    client = Slow(Script(**options.get("script", {})), max_model_len=1_000_000)
    client.file = Path(options["start"]) if "start" in options else None
    server.LINGER = options.get("linger", server.LINGER)
    try:
        config = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options["config"].items()
        }
        serve(client, ServerConfig(port=0, **config))
    except NanoInferenceError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

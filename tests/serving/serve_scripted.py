"""A server on a scripted engine as a process of its own: `python -m tests.serving.serve_scripted
'{"script": ...}'`.

Keys: `script` and `config` (arguments of `Script` and `ServerConfig`), `start` (seconds that the
engine takes to be built; negative: it cannot be), `linger`.
"""

import asyncio
import json
import sys

from nano_inference.errors import ModelLoadError, NanoInferenceError
from nano_inference.serving import server
from nano_inference.serving.config import ServerConfig
from nano_inference.serving.main import serve
from tests.serving.scripted import Script, ScriptedClient


class Slow(ScriptedClient):
    seconds: float = 0.0

    async def start(self) -> None:
        await asyncio.sleep(abs(self.seconds))
        if self.seconds < 0:
            raise ModelLoadError("there is no such model.")
        await super().start()


def main(options: dict) -> None:
    options = {"config": {}, **options}
    client = Slow(Script(**options.get("script", {})), max_model_len=1_000_000)
    client.seconds = options.get("start", 0.0)
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

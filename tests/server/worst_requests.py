"""Send the worst combination of all fields, lowered as the errors say until it is accepted, under
an address space limit that unbounded requests would exceed.

Run as `python -m tests.server.worst_requests "in process"` or `"over http"`.
"""

import json
import re
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

MIB = 1 << 20


def limit(mebibytes: int) -> None:
    """Limit this process to its current address space plus a margin."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + mebibytes * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def lowered(ask: Callable[[], str | None], lower: Callable[[str, int], None]) -> int:
    """Lower the fields that the errors name until the request is accepted. Return the number of
    errors.
    """
    for times in range(20):
        refusal = ask()
        if refusal is None:
            return times
        matched = re.findall(r"(\S+)(?: \(with echo also logprobs\))? from \d+ to (\d+)", refusal)
        assert matched, refusal
        for name, value in matched:
            lower(name, int(value))
    raise AssertionError("it is never taken")


def in_process() -> None:
    from nano_inference import EngineConfig, InferenceEngine, RequestTooLarge, SamplingParams
    from tests.models.tiny import tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder), vocab_size=50_000, max_position=4096)
        options: dict[str, Any] = {
            "num_threads": 1,
            "kv_cache_memory": 64 * MIB,
            "max_request_entries": 1_000_000,
        }
        with InferenceEngine(EngineConfig(str(model), **options)) as engine:
            engine.generate(
                [7], SamplingParams(max_tokens=2, top_p=0.9, sampling_mask=True, top_logprobs=2)
            )
            limit(768)
            mask = {"min_p": 1e-300, "temperature": 2.0, "sampling_mask": True, "ignore_eos": True}
            samples = engine.generate([7], SamplingParams(max_tokens=60, **mask), 128)
            assert {each.finish_reason for each in samples} == {"abort"}
            wide = SamplingParams(max_tokens=8, top_logprobs=50_000, ignore_eos=True)
            # in steps, so that each has an equally wide row
            plain = SamplingParams(max_tokens=8, ignore_eos=True)
            samples = engine.generate([[7]] * 200, [wide, *[plain] * 199])
            assert [
                len(each.top_logprobs[-1].token_ids) for each in samples if each.top_logprobs
            ] == [50_000]
            params = SamplingParams(
                max_tokens=1000,
                top_logprobs=50_000,
                prompt_logprobs=True,
                prompt_top_logprobs=50_000,
                raw_logprobs=True,
                repetition_penalty=1.1,
                logit_bias=dict.fromkeys(range(3, 25_000), 1.0),
                allowed_token_ids=frozenset(range(3, 50_000)),
                stop_token_ids=frozenset(range(40_000, 50_000)),
                **mask,
            )
            asked: dict[str, Any] = {"params": params, "num_samples": 100_000}

            def ask() -> str | None:
                try:
                    asked["id"] = engine.add_request(
                        [7] * 2000, asked["params"], asked["num_samples"]
                    )
                except RequestTooLarge as problem:
                    return str(problem)
                return None

            def lower(name: str, value: int) -> None:
                if name == "num_samples":
                    asked[name] = value
                else:
                    asked["params"] = replace(asked["params"], **{name: value})

            assert lowered(ask, lower) == 1
            while engine.has_pending():
                engine.step()
    print("all answered")


def over_http() -> None:
    import httpx
    import msgspec

    from nano_inference.server.config import ServerConfig
    from nano_inference.server.main import running_server
    from tests.server.scripted import Script, ScriptedClient

    class Bounded(ScriptedClient):
        def _engine_info(self):
            return msgspec.structs.replace(super()._engine_info(), max_request_entries=200_000)

    ids, chat = [7] * 1500, [{"role": "user", "content": "a " * 1500}]
    every: dict[str, Any] = {
        "raw_logprobs": True,
        "repetition_penalty": 1.1,
        "logit_bias": dict.fromkeys(map(str, range(3, 1000)), 1.0),
        "allowed_token_ids": [*range(3, 40_000)],
        "stop_token_ids": [*range(20_000, 40_000)],
        "stop": ["x" * 200] * 16,
    }
    sampled = every | {"n": 4096, "max_tokens": 3000}
    asked: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/completions",
            sampled
            | {
                "prompt": ids,
                "logprobs": 1000,
                "prompt_logprobs": 1000,
                "echo": True,
                "return_token_ids": True,
            },
        ),
        (
            "/v1/chat/completions",
            sampled
            | {"messages": chat, "logprobs": True, "top_logprobs": 1000, "prompt_logprobs": 1000}
            | {"return_token_ids": True},
        ),
        (
            "/v1/messages",
            {
                "model": "scripted",
                "messages": chat,
                "max_tokens": 6000,
                "stop_sequences": ["x" * 200] * 16,
            },
        ),
        (
            "/generate",
            {
                "input_ids": ids,
                "sampling_params": every | {"n": 4096, "max_new_tokens": 3000},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 1000,
                "return_prompt_token_ids": True,
            },
        ),
        (
            "/inference/v1/generate",
            {
                "token_ids": ids,
                "sampling_params": sampled | {"logprobs": 1000, "prompt_logprobs": 1000},
            },
        ),
    ]
    client = Bounded(Script([9, 10], ends=False, portion=3000), max_model_len=8000)
    with running_server(client, ServerConfig(port=0, rl=True, max_logit_bias=2000)) as url:
        httpx.post(
            url + "/v1/completions",
            json={"prompt": [7], "max_tokens": 2, "logprobs": 1},
            timeout=60,
        )
        limit(512)
        for route, body in asked:

            def ask(route: str = route, body: dict[str, Any] = body) -> str | None:
                with httpx.stream("POST", url + route, json=body, timeout=120) as reply:
                    if reply.status_code == 200:
                        assert sum(map(len, reply.iter_bytes()))
                        return None
                    return json.loads(reply.read())["error"]["message"]

            def lower(name: str, value: int, body: dict[str, Any] = body) -> None:
                *outer, last = name.split(".")
                for item in outer:
                    body = body[item]
                # echo reports as many
                if last == "prompt_logprobs" and isinstance(body.get("logprobs"), int):
                    body["logprobs"] = min(body["logprobs"], value)
                assert last in body, name
                body[last] = value

            assert lowered(ask, lower) == 1 or route == "/v1/messages"
            assert httpx.get(url + "/health", timeout=60).status_code == 200
    print("all answered")


if __name__ == "__main__":
    {"in process": in_process, "over http": over_http}[sys.argv[1]]()

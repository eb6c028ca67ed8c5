"""An environment of verifiers for tests: letters are rewarded, over one turn or with a tool.

Its chat program runs in this process, which verifiers allows: all model calls go to the endpoint.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf

RELEASED = threading.Event()  # ends the fault "block"

__all__ = ["ChatHarness", "LettersTaskset"]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


class LettersConfig(vf.TasksetConfig):
    turns: int = 1
    fault: str = ""  # see `Letters.reward` and `ChatHarness`
    faulty: int = 2  # number of the task with the fault


class LettersData(vf.TaskData):
    turns: int = 1
    fault: str = ""


class Letters(vf.Task[LettersData]):
    @vf.reward
    async def letters(self, trace: Any) -> float:
        if self.data.fault == "raise":
            raise ValueError("this rubric is broken")
        if self.data.fault == "nan":
            return float("nan")
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(character.isalpha() for character in text) / (len(text) + 1)


class LettersTaskset(vf.Taskset[Letters, LettersConfig]):
    def load(self) -> Iterable[Letters]:
        config = self.config
        for number in range(8):
            fault = config.fault if number == config.faulty else ""
            data = LettersData(prompt=f"Say {number}.", turns=config.turns, fault=fault)
            yield Letters(data, config.task)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        await interfere(data.fault)
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for turn in range(data.turns):
                body: dict[str, Any] = {"model": ctx.model, "messages": messages}
                body |= {"tools": [TOOL]} if data.turns > 1 else {}
                body |= {"top_k": 5} if data.fault == "top_k" else {}
                head = {"Authorization": f"Bearer {secret}"}
                url = f"{endpoint}/chat/completions"
                reply = await client.post(url, json=body, headers=head)
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text)
                message = reply.json()["choices"][0]["message"]
                messages += [message, *answers(message, turn)]
                if data.fault == "rewrite":
                    messages[1] = {"role": "assistant", "content": "Something else."}
                if data.fault == "forget":
                    messages[0] = {"role": "user", "content": "Another question."}
        return vf.ProgramResult(0, "", "")


async def interfere(fault: str) -> None:
    """Hang, politely or not."""
    if fault == "hang":
        await asyncio.Event().wait()
    if fault == "block":
        assert not RELEASED.is_set()
        RELEASED.wait()


def answers(message: dict[str, Any], turn: int) -> list[dict[str, Any]]:
    """Return the results of a message's calls, or a remark if it has none."""
    calls = message.get("tool_calls") or []
    results = []
    for call in calls:
        values = json.loads(call["function"]["arguments"])
        content = str(values.get("a", 0) + values.get("b", 0))
        results.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return results or [{"role": "user", "content": f"Go on {turn}."}]

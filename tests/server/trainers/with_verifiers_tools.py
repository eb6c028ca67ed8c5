"""Play tasks of `verifiers_tools` against a server: `python with_verifiers_tools.py URL
TOKENIZER_FOLDER SAMPLING TURNS`, with sampling parameters as JSON.

Run by an interpreter that has verifiers and renderers. Prints one trace per task as JSON: what a
trainer would get.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

from renderers import Qwen3RendererConfig
from verifiers.v1 import (
    AgentConfig,
    ModelContext,
    SamplingConfig,
    SingleAgentEnv,
    SingleAgentEnvConfig,
    SubprocessConfig,
    Trace,
    TrainClientConfig,
)

URL, FOLDER, SAMPLING, TURNS = sys.argv[1:5]


async def main() -> None:
    agent = AgentConfig(
        harness={"id": "null"}, runtime=SubprocessConfig(), max_turns=int(TURNS), model="tiny"
    )
    env = SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": "verifiers_tools"}, agent=agent))
    client = TrainClientConfig(
        base_url=f"{URL}/v1",
        api_key_var="NO_KEY",
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=FOLDER,
    )
    context = ModelContext("tiny", client, SamplingConfig(**json.loads(SAMPLING)))
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_episode(task, context) for task in env.taskset))
    print(json.dumps([plain(trace) for episode in episodes for trace in episode.traces]))


def plain(trace: Trace) -> dict[str, Any]:
    return {
        "errors": [error.model_dump(mode="json") for error in trace.errors],
        "stop": trace.stop_condition,
        "answers": [message.content for message in trace.tool_messages],
        "branches": [
            {
                "token_ids": branch.token_ids,
                "sampled": branch.sampled_mask,
                "logprobs": branch.logprobs,
            }
            for branch in trace.branches
        ],
    }


asyncio.run(main())

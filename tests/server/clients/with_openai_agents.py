"""openai-agents on `/v1/responses`: turns with a function, a shell, a patch and a custom tool, whole,
streamed and with stored responses. The server scripts the calls.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    ApplyPatchTool,
    CustomTool,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    ShellTool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, _strict_response_validation=True
)
model = OpenAIResponsesModel(sys.argv[2], client)
FORCED = sys.argv[3] == "forced"
ran: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Look up the weather.

    Args:
        city: Name of the city.
    """
    ran.append(f"weather {city}" if not FORCED else "weather")
    return "sunny"


class Editor:
    """Editor that only records."""

    def _done(self, operation: Any) -> str:
        ran.append(f"{operation.type} {operation.path}")
        return "done"

    create_file = update_file = delete_file = _done


def shell(request: Any) -> str:
    ran.append(f"shell {' '.join(request.data.action.commands)}")
    return "a.txt"


async def query(_: Any, text: str) -> str:
    ran.append(f"query {text}")
    return "3 rows"


ANY: list[Any] = [
    weather,
    ShellTool(executor=shell),
    ApplyPatchTool(editor=Editor()),
    CustomTool(name="query", description="Query.", on_invoke_tool=query),
]


async def main() -> None:
    settings = ModelSettings(
        tool_choice="required" if FORCED else None,
        max_tokens=200,
        store=True,
        truncation="auto",
        response_include=["reasoning.encrypted_content"],
    )
    agent = Agent(
        name="tester",
        instructions="Use the tools.",
        model=model,
        tools=[weather] if FORCED else ANY,
        model_settings=settings,
        reset_tool_choice=False,
        tool_use_behavior="run_llm_again",
    )
    outcomes: dict[str, Any] = {}
    if FORCED:
        history: Any = "What is the weather in Rome?"
        for _ in range(5):  # a forced model never answers with text, so each run is one turn
            stopped = agent.clone(tool_use_behavior="stop_on_first_tool")
            result = await Runner.run(stopped, history)
            history = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
        outcomes["forced"] = ran[:]
    else:
        for way in ("whole", "streamed", "stored"):
            ran.clear()
            options: Any = {"auto_previous_response_id": way == "stored"}
            if way == "streamed":
                streamed = Runner.run_streamed(agent, "Go.", **options)
                async for _ in streamed.stream_events():
                    pass
                final = streamed.final_output
            else:
                final = (await Runner.run(agent, "Go.", **options)).final_output
            outcomes[way] = [*ran, final]
    print(json.dumps(outcomes))


asyncio.run(main())

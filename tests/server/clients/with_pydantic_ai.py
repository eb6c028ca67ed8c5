"""pydantic-ai: by a forced tool and by a schema, whole and streamed, in both protocols."""
# pyright: reportMissingImports=false

import asyncio

from asked import MODEL, TEXT, URL, Pet, tell
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

chat = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
SETTINGS = {"max_tokens": 300}


def asked(model: object, output: object) -> object:
    agent = Agent(model, output_type=output, retries=0, model_settings=SETTINGS)
    return agent.run_sync(TEXT).output


async def streamed() -> object:
    agent = Agent(chat, output_type=NativeOutput(Pet), retries=0, model_settings=SETTINGS)
    async with agent.run_stream(TEXT) as stream:
        return await stream.get_output()


tell(
    tool=asked(chat, ToolOutput(Pet)),
    schema=asked(chat, NativeOutput(Pet)),
    streamed=asyncio.run(streamed()),
    messages=asked(messages, ToolOutput(Pet)),
)

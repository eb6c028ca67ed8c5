"""Agents of pydantic-ai, LangChain, smolagents and Anthropic's client: a loop of six turns whose
calls the server scripts, or five forced calls of a small model.
"""
# pyright: reportMissingImports=false

import json
import sys
from typing import Any, ClassVar, Literal

URL, MODEL, CLIENT = sys.argv[1:4]
FORCED = sys.argv[4] == "forced"
CITIES = ("Rome", "Oslo", "Lima", "Bern", "Kyiv")
City = Literal["Rome", "Oslo", "Lima", "Bern", "Kyiv"]  # a small model ends no string of its own
ASKED = "What is the weather?"
ran: list[str] = []


def weather(city: City) -> str:
    """Look up the weather.

    Args:
        city: Name of the city.
    """
    assert city in CITIES
    ran.append(city)
    return f"It is sunny in {city}."


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}


def pydantic_ai() -> Any:
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    models = {
        "chat": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
    }

    def loop(model: Any) -> str:
        if not FORCED:
            agent = Agent(model, tools=[weather], model_settings={"max_tokens": 200})
            return agent.run_sync(ASKED).output
        answer = ToolOutput(weather, name="weather")  # a function that ends a run: it is forced
        one: Any = {"max_tokens": 200, "parallel_tool_calls": False}
        agent = Agent(model, output_type=answer, retries=0, model_settings=one)
        history = None
        for _ in CITIES:
            history = agent.run_sync(ASKED, message_history=history).all_messages()
        return "Done."

    return {name: (lambda model=model: loop(model)) for name, model in models.items()}


def langchain() -> Any:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    options: Any = {"model": MODEL, "max_retries": 0, "max_tokens": 200, "api_key": "none"}
    openai = {"base_url": f"{URL}/v1"} | options
    models = {
        "chat": ChatOpenAI(**openai),
        "streamed": ChatOpenAI(**openai, streaming=True),
        "responses": ChatOpenAI(**openai, use_responses_api=True),
        "messages": ChatAnthropic(base_url=URL, **options),
    }

    def loop(model: Any) -> str:
        if not FORCED:
            agent = create_agent(model, [weather])
            return agent.invoke({"messages": [HumanMessage(ASKED)]})["messages"][-1].text
        one: Any = {"tool_choice": "any", "parallel_tool_calls": False, "strict": True}
        bound = model.bind_tools([weather], **one)
        history: list[Any] = [HumanMessage(ASKED)]
        for _ in CITIES:
            answer = bound.invoke(history)
            (call,) = answer.tool_calls
            result = ToolMessage(weather(call["args"]["city"]), tool_call_id=call["id"])
            history += [answer, result, HumanMessage(ASKED)]
        return "Done."

    return {name: (lambda model=model: loop(model)) for name, model in models.items()}


def smolagents() -> Any:
    from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent

    class Weather(Tool):
        """The weather as a tool of smolagents."""

        name = "weather"
        description = "Look up the weather."
        inputs: ClassVar = {"city": {"type": "string", "description": "City", "enum": CITIES}}
        output_type = "string"

        def forward(self, city: str) -> str:
            return weather(city)  # pyright: ignore[reportArgumentType]

    def loop(stream: bool) -> str:
        function = {"name": "weather", "description": "Look it up.", "parameters": SCHEMA}
        strict = {"type": "function", "function": function | {"strict": True}}
        only: Any = {"parallel_tool_calls": False, "tools": [strict]} if FORCED else {}
        model = OpenAIModel(MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=200, **only)
        options: Any = {"verbosity_level": LogLevel.OFF, "stream_outputs": stream}
        agent = ToolCallingAgent([Weather()], model, **options)
        if not FORCED:
            return str(agent.run(ASKED))
        del agent.tools["final_answer"]  # the only tool that is left is forced
        for step in range(len(CITIES)):
            agent.run(ASKED, max_steps=1, reset=not step)
        return "Done."

    return {"whole": lambda: loop(False), "streamed": lambda: loop(True)}


def anthropic() -> Any:
    from anthropic import Anthropic

    def loop(stream: bool) -> str:
        client = Anthropic(base_url=URL, api_key="none", max_retries=0)
        tool = {"name": "weather", "description": "Look it up.", "input_schema": SCHEMA}
        options: Any = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
        options |= {"tool_choice": {"type": "any"}} if FORCED else {}
        history: list[Any] = [{"role": "user", "content": ASKED}]
        while True:
            if stream:
                with client.messages.stream(messages=history, **options) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=history, **options)
            history.append({"role": "assistant", "content": answer.content})
            calls = [part for part in answer.content if part.type == "tool_use"]
            if not calls:
                return "".join(part.text for part in answer.content if part.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
                for call in calls
            ]
            history.append({"role": "user", "content": results})
            if FORCED and len(ran) == len(CITIES):
                return "Done."

    return {"whole": lambda: loop(False), "streamed": lambda: loop(True)}


outcomes: dict[str, list[str]] = {}
for name, loop in globals()[CLIENT]().items():
    ran.clear()
    final = loop()
    outcomes[name] = [*ran, final]
print()  # smolagents ends no line
print(json.dumps(outcomes))

"""Use a server with Ollama's client. Run by a separate interpreter, with the server's URL and the
name of its model.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import sys

from ollama import AsyncClient, Client, ResponseError

URL, MODEL = sys.argv[1:]
client = Client(host=URL)
ASK = [{"role": "user", "content": "What is the capital of France?"}]
COLD = {"temperature": 0, "num_predict": 12, "num_ctx": 512}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}, "busy": {"type": "boolean"}},
    "required": ["age", "busy"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"


def refused(call) -> list:
    try:
        call()
    except ResponseError as problem:
        return [problem.status_code, problem.error]
    return ["nothing"]


async def awaited() -> str:
    reply = await AsyncClient(host=URL).chat(MODEL, ASK, options=COLD)
    return reply.message.content


chat = client.chat(MODEL, ASK, options=COLD)
streamed = list(client.chat(MODEL + ":latest", ASK, options=COLD, stream=True))
first = client.generate(MODEL, "Name a river.", system="Be brief.", options=COLD)
second = client.generate(MODEL, "Another one.", context=first.context, options=COLD)
with_logprobs = client.chat(MODEL, ASK, options=COLD, logprobs=True, top_logprobs=2)
tools = client.chat(MODEL, ASK, tools=[weather], options=COLD)
history = [
    *ASK,
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "tool_name": "weather", "content": weather("Paris")},
]
shown = client.show(MODEL)
embedded = client.embed(MODEL, ["one", "two"])
seen = {
    "chat": [chat.message.content, chat.done_reason, chat.prompt_eval_count, chat.eval_count],
    "streamed": [
        "".join(each.message.content for each in streamed),
        streamed[-1].done_reason,
        streamed[-1].prompt_eval_count,
        streamed[-1].eval_count,
    ],
    "num_streamed": len(streamed),
    "awaited": asyncio.run(awaited()),
    "durations": [chat.total_duration, streamed[-1].prompt_eval_duration],
    "generated": [first.response, second.response, len(first.context), second.prompt_eval_count],
    "generate_streamed": "".join(
        each.response
        for each in client.generate(
            MODEL, "Name a river.", system="Be brief.", options=COLD, stream=True
        )
    ),
    "raw": client.generate(MODEL, "Paris is in", raw=True, options=COLD).context,
    "logprobs": [[row.token, row.logprob, len(row.top_logprobs)] for row in with_logprobs.logprobs],
    "tools": [tools.message.role, [call.function.name for call in tools.message.tool_calls or ()]],
    "after_tools": client.chat(MODEL, history, tools=[weather], options=COLD).message.role,
    "json": client.chat(MODEL, ASK, format=SCHEMA, options={"num_predict": 64}).message.content,
    "list": [row.model for row in client.list().models],
    "sizes": [row.size for row in client.list().models],
    "running": [[row.model, row.context_length] for row in client.ps().models],
    "show": [shown.details.family, shown.capabilities, shown.modelinfo],
    "embed": [len(embedded.embeddings), sum(x * x for x in embedded.embeddings[0])],
    "old_embed": len(client.embeddings(MODEL, "one").embedding),
    "loaded": client.generate(MODEL).done_reason,
    "no_model": refused(lambda: client.chat("none", ASK)),
    "image": refused(
        lambda: client.chat(MODEL, [{"role": "user", "content": "?", "images": ["aGk="]}])
    ),
    "pull": refused(lambda: client.pull("llama3")),
    "hot": refused(lambda: client.chat(MODEL, ASK, options={"temperature": -1})),
    "thinks": refused(lambda: client.chat(MODEL, ASK, think=True)),
    "unload": refused(lambda: client.generate(MODEL, keep_alive=0)),
}
print(json.dumps(seen))

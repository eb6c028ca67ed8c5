"""instructor: by forced tools and by a schema, whole and in parts, in both protocols."""
# pyright: reportMissingImports=false

import instructor
from anthropic import Anthropic
from asked import MODEL, TEXT, URL, Pet, tell
from openai import OpenAI

ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 300,
    "max_retries": 0,
}
openai = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
anthropic = Anthropic(base_url=URL, api_key="none", max_retries=0)


def of_openai(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai, mode=mode)


tools, schema = of_openai(instructor.Mode.TOOLS), of_openai(instructor.Mode.JSON_SCHEMA)
messages = instructor.from_anthropic(anthropic, mode=instructor.Mode.ANTHROPIC_TOOLS)
tell(
    tools=tools.create(response_model=Pet, **ASK),
    strict=of_openai(instructor.Mode.TOOLS_STRICT).create(response_model=Pet, **ASK),
    schema=schema.create(response_model=Pet, **ASK),
    parts=list(schema.create_partial(response_model=Pet, **ASK))[-1],
    messages=messages.create(response_model=Pet, **ASK),
)

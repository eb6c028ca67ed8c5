"""smolagents: its models' answers by a schema and by tools, one of which it requires."""
# pyright: reportMissingImports=false

import json
from typing import ClassVar

from asked import MODEL, TEXT, URL, Pet, tell
from smolagents import OpenAIModel, Tool

model = OpenAIModel(MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=300)
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "pet", "strict": True, "schema": Pet.model_json_schema()},
}


class TakeIn(Tool):
    """A tool of bounded arguments: a small model would never end a string of its own."""

    name = "take_in"
    description = "Take a pet in."
    inputs: ClassVar = {
        "kind": {"type": "string", "description": "of pet", "enum": ["cat", "dog"]},
        "age": {"type": "integer", "description": "in years", "minimum": 0, "maximum": 30},
        "tame": {"type": "boolean", "description": "whether it is"},
    }
    output_type = "string"

    def forward(self, kind: str, age: int, tame: bool) -> str:
        return f"{kind} {age} {tame}"


def called() -> dict:
    call = model.generate(MESSAGES, tools_to_call_from=[TakeIn()]).tool_calls[0]
    return json.loads(call.function.arguments)


tell(
    schema=json.loads(model.generate(MESSAGES, response_format=FORMAT).content),
    tool=called(),
)

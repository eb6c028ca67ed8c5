"""The format of gpt-oss for tests: its special tokens in a small vocabulary, and a chat template
after OpenAI's description of the format (https://github.com/openai/harmony, docs/format.md).
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.server.scripted import smollm2

SPECIAL = [
    *("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    "<|call|>",
]

# Supports these parts of gpt-oss's own template: system and developer messages, tools as
# types, one call a message, its tool's name before the answer, thoughts only before calls that
# nothing final follows, and refusals of what it cannot render.
TEMPLATE = """\
{%- macro type_of(schema) -%}
{%- if schema.enum is defined -%}
{{- '"' + schema.enum | join('" | "') + '"' -}}
{%- elif schema.type == "array" -%}
{{- type_of(schema['items']) + "[]" -}}
{%- elif schema.type == "integer" -%}
number
{%- else -%}
{{- schema.type or "any" -}}
{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(tools) -%}
{{- "## functions\\n\\nnamespace functions {\\n\\n" -}}
{%- for tool in tools -%}
{%- set tool = tool.function -%}
{{- "// " + (tool.description or "") + "\\ntype " + tool.name + " = " -}}
{%- if tool.parameters and tool.parameters.properties -%}
{{- "(_: {\\n" -}}
{%- for name, schema in tool.parameters.properties.items() -%}
{%- if schema.description is defined -%}{{- "// " + schema.description + "\\n" -}}{%- endif -%}
{{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " -}}
{{- type_of(schema) + ",\\n" -}}
{%- endfor -%}
{{- "}) => any;\\n\\n" -}}
{%- else -%}
{{- "() => any;\\n\\n" -}}
{%- endif -%}
{%- endfor -%}
{{- "} // namespace functions" -}}
{%- endmacro -%}
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" -}}
{{- "Knowledge cutoff: 2024-06\\n\\nReasoning: " + (reasoning_effort or "medium") + "\\n\\n" -}}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." -}}
{%- if tools -%}
{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." -}}
{%- endif -%}
{{- "<|end|>" -}}
{%- set instructions = "" -%}
{%- set turns = messages -%}
{%- if messages[0].role in ("system", "developer") -%}
{%- set instructions = messages[0].content -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{%- if instructions or tools -%}
{{- "<|start|>developer<|message|>" -}}
{%- if instructions -%}{{- "# Instructions\\n\\n" + instructions + "\\n\\n" -}}{%- endif -%}
{%- if tools -%}{{- "# Tools\\n\\n" + namespace_of(tools) -}}{%- endif -%}
{{- "<|end|>" -}}
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for message in turns -%}
{%- if message.role == "assistant" and message.tool_calls -%}
{%- set later = namespace(final=false) -%}
{%- for other in turns[loop.index:] -%}
{%- if other.role == "assistant" and not other.tool_calls -%}{%- set later.final = true -%}{%- endif -%}
{%- endfor -%}
{%- if message.content and message.thinking -%}
{{- raise_exception("content and thinking beside a tool call: give one.") -}}
{%- endif -%}
{%- set thought = message.content or message.thinking -%}
{%- if thought and not later.final -%}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" -}}
{{- call.arguments | tojson + "<|call|>" -}}
{%- set called.name = call.name -%}
{%- elif message.role == "assistant" and loop.last and not add_generation_prompt -%}
{%- if message.thinking -%}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" -}}
{%- endif -%}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" -}}
{%- elif message.role == "assistant" -%}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" -}}
{%- set called.name = none -%}
{%- elif message.role == "tool" -%}
{%- if called.name is none -%}
{{- raise_exception("a tool's message needs a call before it.") -}}
{%- endif -%}
{{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" -}}
{{- message.content | tojson + "<|end|>" -}}
{%- elif message.role == "user" -%}
{{- "<|start|>user<|message|>" + message.content + "<|end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" -}}{%- endif -%}
"""


def harmony_tokenizer(folder: Path) -> Path:
    """Write SmolLM2's tokenizer with harmony's tokens and template into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = smollm2()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    kept = {
        key: value for key, value in config.items() if key in ("tokenizer_class", "bos_token")
    } | {"eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder

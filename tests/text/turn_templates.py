"""Chat templates in the style of today's families, shortened: how each ends a turn, and how each
renders past turns. `REWRITES` names those that render a past turn differently than it was sampled.
"""

from tests.text.chat_templates import LLAMA, QWEN

CONTROL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|begin_of_text|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "[INST]"),
    *("[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    *(
        "<|return|>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "<\uff5ctool▁call▁begin\uff5c>",
    ),
    *(
        "<\uff5ctool▁call▁end\uff5c>",
        "<\uff5ctool▁output▁begin\uff5c>",
        "<\uff5ctool▁output▁end\uff5c>",
        "<\uff5ctool▁sep\uff5c>",
    ),
]

MISTRAL = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'system' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% for m in messages %}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GPT_OSS = """{%- set ns = namespace(tool=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}{% set ns.tool = call.name %}
        {%- if m.reasoning_content is defined and m.reasoning_content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}
    {%- elif m.role == 'tool' %}
        {%- if ns.tool is none %}{{ raise_exception('no call precedes this result') }}{% endif %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{%- set ns = namespace(tool=false) -%}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ m.content }}
    {%- elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}{% set ns.tool = false %}
    {%- elif m.role == 'assistant' %}
        {%- if not ns.tool %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}{% set ns.tool = false %}
        {%- if m.content %}{{ m.content.split('</think>')[-1] }}{% endif %}
        {%- for call in m.tool_calls or [] %}{{ '<\uff5ctool▁call▁begin\uff5c>' + call.function.name + '<\uff5ctool▁sep\uff5c>' + (call.function.arguments | tojson) + '<\uff5ctool▁call▁end\uff5c>' }}{% endfor %}
        {{- '<\uff5cend▁of▁sentence\uff5c>' }}
    {%- elif m.role == 'tool' %}{{ '<\uff5ctool▁output▁begin\uff5c>' + m.content + '<\uff5ctool▁output▁end\uff5c>' }}{% set ns.tool = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}"""

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# name -> template, token at the beginning, tokens that end a turn of the model
TEMPLATES = {
    "qwen3": (QWEN, "", ("<|im_end|>",)),
    "llama3": (LLAMA, "<|begin_of_text|>", ("<|eot_id|>",)),
    "mistral": (MISTRAL, "<s>", ("</s>",)),
    "gemma": (GEMMA, "<bos>", ("<end_of_turn>",)),
    "gpt-oss": (GPT_OSS, "", ("<|call|>", "<|return|>", "<|end|>")),
    "deepseek": (DEEPSEEK, "<s>", ("<\uff5cend▁of▁sentence\uff5c>",)),
    "chatml": (CHATML, "", ("<|im_end|>",)),
}

"""Chat templates in the style of three families: how they declare tools, write calls and render
tool results.
"""

# Tools in the system message as JSON lines, calls and results between tags. Results of one turn
# share a user message.
QWEN = """{%- macro show(call) %}
    {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
    {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
    {{- '}\\n</tool_call>' }}
{%- endmacro %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if ns.last_query < 0 and message.role == 'user' and message.content is string %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools, one in a line:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nCall one like this:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- show(call.function or call) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# Tools as indented JSON in the first user message. One call a turn is the whole answer.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{ raise_exception("there is no user message to put tools into") }}{% endif %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer {"name": function, "parameters": its arguments}.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception("one tool call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

# Tools as signatures built by recursive macros. Arguments are iterated, contents are lists of
# parts only.
HERMES = """{%- macro type_of(spec) %}
    {%- if spec.type == 'array' %}list[{{ type_of(spec['items']) }}]
    {%- elif spec.type == 'object' %}dict
    {%- elif spec.type is string %}{{ spec.type }}
    {%- else %}{{ spec.type | join(' or ') }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- for tool in tools or [] %}
    {%- if loop.first %}{{ '<|im_start|>system\\n' }}{% endif %}
    {%- set function = tool.function if tool.type == 'function' else tool %}
    {{- 'def ' ~ function.name ~ '(' }}
    {%- for name, spec in function.parameters.properties.items() %}
        {{- '%s: ' % name }}{{ type_of(spec) }}{{ ', ' if not loop.last }}
    {%- endfor %}
    {{- '):  # ' + function.description + '\\n' }}
    {%- if loop.last %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{ part.text }}{% endif %}
    {%- endfor %}
    {%- for call in message.tool_calls | default([]) %}
        {{- '<tool_call>\\n' + call.function.name }}
        {%- for name, value in call.function.arguments.items() | sort %}
            {{- ' ' ~ name ~ '=' ~ value | tojson }}
        {%- endfor %}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

"""A scripted engine and its server, one per module. Tests set `scripted.script`."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.main import running_server
from tests.server.scripted import Script, ScriptedClient, with_template

# ChatML with tools in Hermes' format, and reasoning that a request may turn off.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '</tools> Call as <tool_call>{...}</tool_call>.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


@dataclass
class Scripted:
    """A scripted engine and its server."""

    client: ScriptedClient
    url: str

    @property
    def script(self):
        return self.client.script

    @script.setter
    def script(self, script: Script):
        self.client.script = script

    def prompt(self) -> str:
        """Return the last prompt as text."""
        return self.client.tokenizer.decode(
            self.client.requests[-1].prompt, skip_special_tokens=False
        )


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = with_template(tmp_path_factory.mktemp("model") / "hermes", TEMPLATE)
    client = ScriptedClient(tokenizer_folder=folder, max_model_len=4096)
    config = ServerConfig(
        port=0, in_process=True, served_model_name="m", max_messages=50, max_body_bytes=1 << 20
    )
    with running_server(client, config) as url:
        yield Scripted(client, url)


@pytest.fixture
def scripted(scripted_server: Scripted) -> Scripted:
    """Reset the script to the default answer."""
    scripted_server.script = Script()
    scripted_server.client.requests.clear()
    return scripted_server

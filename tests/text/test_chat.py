"""Chat templates: rendered prompts and unsupported features."""

import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from nano_inference.errors import InvalidRequest
from nano_inference.text.chat import encode_chat, render_chat
from nano_inference.text.tokenizer import load_tokenizer

CHATML = """{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|" + message.role + "|>" + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
{%- endif %}"""
USER = [{"role": "user", "content": "Hi"}]
TOKENS = {"eos_token": "</s>"}


def render(template: str, messages: Sequence[Mapping[str, object]] = USER) -> str:
    return render_chat(template, messages, special_tokens=TOKENS)


def test_renders_a_conversation() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<b>Hi</b> & bye"},
    ]
    expected = "<|system|>Be brief.</s><|user|><b>Hi</b> & bye</s>"
    assert render(CHATML, messages) == expected + "<|assistant|>"
    assert (
        render_chat(CHATML, messages, add_generation_prompt=False, special_tokens=TOKENS)
        == expected
    )


def test_block_lines_leave_no_blank_lines() -> None:
    template = (
        "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% "
        "endif %}\n{% endfor %}"
    )
    assert render(template) == "Hi\n"


def test_loop_controls_and_generation_blocks() -> None:
    template = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(template) == "01"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_absent_variables_are_what_transformers_passes() -> None:
    assert (
        render("{{ tools is none and documents is none }} {{ bos_token is defined }}")
        == "True False"
    )


def test_tojson_escapes_no_html_and_no_unicode() -> None:
    messages = [{"role": "user", "content": {"q": "<é> & 'x'"}}]
    assert render("{{ messages[0].content | tojson }}", messages) == '{"q": "<é> & \'x\'"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"


def test_strftime_now() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_sandbox_refuses(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template failed"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages[0].content + 1 }}",
        "{{ absent.role }}",
        "{{ 1 // 0 }}",
        "{% unknown %}",
    ],
)
def test_broken_template(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template failed"):
        render(template)


def test_template_refuses_messages() -> None:
    with pytest.raises(InvalidRequest, match="unknown role pirate"):
        render(CHATML, [{"role": "pirate", "content": "Arr"}])


def test_empty_conversation_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="conversation is empty"):
        render(CHATML, [])


def test_messages_are_copied_to_plain_data() -> None:
    class Role(str, enum.Enum):  # noqa: UP042 - the kind whose str() is not its value
        USER = "user"

    parts = [{"type": "text", "text": "Hi"}, 1, 2.5, None, True]
    template = "{{ messages[0].role }} {{ messages[0].content | tojson }}"
    expected = 'user [{"type": "text", "text": "Hi"}, 1, 2.5, null, true]'
    assert render(template, [{"role": Role.USER, "content": tuple(parts)}]) == expected


def test_object_with_methods_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="contains a value of type PosixPath"):
        render(CHATML, [{"role": "user", "content": Path("/")}])


def test_encode_chat_adds_no_tokens_of_its_own(tmp_path: Path) -> None:
    vocab = {"<s>": 0, "</s>": 1, "<|user|>": 2, "<|assistant|>": 3, "H": 4, "i": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>"})
    )
    with pytest.raises(InvalidRequest, match="no chat template"):
        encode_chat(load_tokenizer(tmp_path), USER)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert encode_chat(load_tokenizer(tmp_path), USER) == [2, 4, 5, 1, 3]

"""Formats of tool calls, one row per model family. The row gives parser, stream and grammar.

An answer has text, then sections of calls:

    begin opening CALL joint CALL ... closing

A call is one JSON object with its name (`ObjectCall`), or has its name in front of its arguments
(`NamedCall`). Arguments are a JSON object (`JsonArguments`), tags (`TaggedArguments`), or keywords
with literals (`KeywordArguments`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

NAME = re.compile(r"[^\s<>\[\](){}\"'|=,;]+")  # a name, or an id, that is written without quotes


@dataclass(frozen=True, slots=True)
class Notation:
    """Notation of literals.

    Attributes:
        quotes: Markers around a string. The grammar writes the first.
        escapes: True if a backslash escapes in strings. False: strings end at their marker.
        words: Word that the parser reads -> JSON.
        true, false, null: Words that the grammar writes.
        bare_keys: True if keys of objects have no quotes.
        gap: Space that the grammar writes after a comma or a colon.
    """

    quotes: tuple[str, ...]
    escapes: bool
    true: str
    false: str
    null: str
    bare_keys: bool
    gap: str
    words: Mapping[str, str] = field(
        default_factory=lambda: {
            "True": "true",
            "False": "false",
            "None": "null",
            "true": "true",
            "false": "false",
            "null": "null",
        }
    )


PYTHON = Notation(('"', "'"), True, "True", "False", "None", False, " ")
GEMMA = Notation(('<|"|>',), False, "true", "false", "null", True, "")


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments that are one JSON object.

    Attributes:
        fenced: True if the object may stand in a Markdown fence, which the grammar writes.
    """

    fenced: bool = False


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments that are a sequence of keys and values between markers. A string is written as it
    is, any other value as JSON: the tool's schema decides which.

    Attributes:
        key: Marker before a key.
        key_end: Marker after it.
        value: Marker before the value, after optional whitespace.
        end: Marker after the value. Inside a string it counts only before another key, the end of
            the call or the end of the section.
        lines: True if a value stands on lines of its own, so that a line break at its beginning and
            at its end is not part of it.
        gap: Whitespace that the grammar allows before a key, and before the end of the call.
        typed: Texts of `key_end` for a string and for another value, if the model writes the type.
    """

    key: str
    key_end: str
    end: str
    value: str = ""
    lines: bool = False
    gap: str = "\n"
    typed: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class KeywordArguments:
    """Arguments that are literals with keywords, separated by commas.

    Attributes:
        assign: Text between keyword and literal.
        notation: Notation of the literals.
    """

    assign: str
    notation: Notation


Arguments = JsonArguments | TaggedArguments | KeywordArguments


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call that is one JSON object with `name` and arguments.

    Attributes:
        arguments: Key of the arguments, as models write it.
        optional: True if a call may omit its arguments.
    """

    arguments: str = "arguments"
    optional: bool = False


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call whose name precedes its arguments. Whitespace between the parts is ignored.

    Attributes:
        arguments: Notation of the arguments.
        before: Text before the name.
        after: Text after it.
        close: Text after the arguments.
        prefix: Text at the beginning of the name, which is not part of it. Optional in the output.
        numbered: True if `:` and a number follow the name. Together they are the call's id.
        id: Marker of an id between the name and `after`. Optional in the output.
    """

    arguments: Arguments
    before: str = ""
    after: str = ""
    close: str = ""
    prefix: str = ""
    numbered: bool = False
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Notation of tool calls in a model family. Whitespace around all parts is ignored.

    Attributes:
        begin: Marker that opens a section.
        sign: Regular expression that matches the family's chat templates.
        other_sign: Regular expression that matches templates of other formats with the same
            markers, but none of this family.
        call: Notation of a call.
        bare: Text with which an answer may begin with a section without `begin`. Empty: none.
        opener: Text that the parser requires between `begin` and the first call.
        separator: Text between calls. Optional in the output.
        end: Marker that closes a section. Optional in the output.
        opening, joint, closing: Text that a grammar writes between `begin` and the first call,
            between calls, and after the last.
    """

    begin: str
    sign: str
    call: ObjectCall | NamedCall = ObjectCall()
    other_sign: str = r"(?!)"
    bare: str = ""
    opener: str = ""
    separator: str = ""
    end: str = ""
    opening: str = ""
    joint: str = ""
    closing: str = ""

    @property
    def typed(self) -> bool:
        """True if the parser needs the schemas of the tools."""
        arguments = self.call.arguments if isinstance(self.call, NamedCall) else None
        return isinstance(arguments, TaggedArguments)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which the parser must see. Longest first."""
        texts = {self.begin, self.end, self.opening, self.joint, self.closing}
        if isinstance(self.call, NamedCall):
            call, arguments = self.call, self.call.arguments
            texts |= {call.before, call.after, call.close, call.id}
            if isinstance(arguments, TaggedArguments):
                texts |= {arguments.key, arguments.key_end, arguments.value, arguments.end}
            elif isinstance(arguments, KeywordArguments):
                texts |= {*arguments.notation.quotes}
        parts = {part for text in texts for part in _MARKER.findall(text)} | {*filter(None, texts)}
        return tuple(sorted(parts, key=lambda each: (-len(each), each)))


_MARKER = re.compile(r"<[^<>\n]+>|\[[A-Z_]+\]")  # markers within a longer text


_TOOL_CALL = "<tool_call>"


def _dsml(section: str) -> ToolFormat:
    """Return the format of DeepSeek's markup language with this name of a section of calls."""
    return ToolFormat(
        begin=f"<\uff5cDSML\uff5c{section}>",
        sign=rf"\uff5cDSML\uff5c[\s\S]*{section}",
        call=NamedCall(
            TaggedArguments(
                '<\uff5cDSML\uff5cparameter name="',
                '" string="',
                "</\uff5cDSML\uff5cparameter>",
                typed=('true">', 'false">'),
            ),
            before='<\uff5cDSML\uff5cinvoke name="',
            after='">',
            close="</\uff5cDSML\uff5cinvoke>",
        ),
        end=f"</\uff5cDSML\uff5c{section}>",
        opening="\n",
        joint="\n",
        closing=f"\n</\uff5cDSML\uff5c{section}>",
    )


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    # Qwen 2.5 and 3, Hermes 2 and 3, Granite 4 (templates of the models)
    "hermes": ToolFormat(
        begin=_TOOL_CALL,
        sign=r"<tool_call>",
        other_sign=r"<function=|<arg_key>|<minimax:|<invoke name=|<tool_calls>\[",
        call=ObjectCall(optional=True),
        end="</tool_call>",
        opening="\n",
        joint="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    # Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, MiMo (templates); vLLM qwen3_coder
    "qwen3_coder": ToolFormat(
        begin=_TOOL_CALL,
        sign=r"<tool_call>[\s\S]*<function=",
        call=NamedCall(
            TaggedArguments("<parameter=", ">", "</parameter>", lines=True),
            before="<function=",
            after=">",
            close="</function>",
        ),
        bare="<function=",
        end="</tool_call>",
        opening="\n",
        joint="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
    ),
    # ByteDance Seed-OSS (template); vLLM seed_oss
    "seed_oss": ToolFormat(
        begin="<seed:tool_call>",
        sign=r"<seed:tool_call>|seed:tool_call",
        call=NamedCall(
            TaggedArguments("<parameter=", ">", "</parameter>"),
            before="<function=",
            after=">",
            close="</function>",
        ),
        end="</seed:tool_call>",
        opening="\n",
        joint="\n</seed:tool_call>\n<seed:tool_call>\n",
        closing="\n</seed:tool_call>",
    ),
    # GLM 4.5 to 4.7 (templates: 4.5 with line breaks, 4.7 without); vLLM glm45, glm47
    "glm45": ToolFormat(
        begin=_TOOL_CALL,
        sign=r"<arg_key>",
        call=NamedCall(
            TaggedArguments("<arg_key>", "</arg_key>", "</arg_value>", value="<arg_value>"),
        ),
        end="</tool_call>",
        joint="</tool_call>\n<tool_call>",
        closing="</tool_call>",
    ),
    # DeepSeek V3 and R1 (templates): a fence around the arguments; vLLM deepseek_v3
    "deepseek_v3": ToolFormat(
        begin="<\uff5ctool▁calls▁begin\uff5c>",
        sign=r"<\uff5ctool▁call▁begin\uff5c>(?=[\s\S]*```json)",
        call=NamedCall(
            JsonArguments(fenced=True),
            before="<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
            close="<\uff5ctool▁call▁end\uff5c>",
        ),
        end="<\uff5ctool▁calls▁end\uff5c>",
        joint="\n",
        closing="<\uff5ctool▁calls▁end\uff5c>",
    ),
    # DeepSeek V3.1 (template); vLLM deepseek_v31
    "deepseek_v31": ToolFormat(
        begin="<\uff5ctool▁calls▁begin\uff5c>",
        sign=r"<\uff5ctool▁call▁begin\uff5c>",
        other_sign=r"```json",
        call=NamedCall(
            JsonArguments(),
            before="<\uff5ctool▁call▁begin\uff5c>",
            after="<\uff5ctool▁sep\uff5c>",
            close="<\uff5ctool▁call▁end\uff5c>",
        ),
        end="<\uff5ctool▁calls▁end\uff5c>",
        closing="<\uff5ctool▁calls▁end\uff5c>",
    ),
    # DeepSeek V3.2 (encoding_dsv32.py of the model); vLLM deepseek_v32
    "deepseek_v32": _dsml("function_calls"),
    # DeepSeek V4 (template); vLLM deepseek_v4
    "deepseek_v4": _dsml("tool_calls"),
    # Kimi K2 (template and docs/tool_call_guidance.md of the model); vLLM kimi_k2
    "kimi_k2": ToolFormat(
        begin="<|tool_calls_section_begin|>",
        sign=r"<\|tool_calls_section_begin\|>",
        call=NamedCall(
            JsonArguments(),
            before="<|tool_call_begin|>",
            after="<|tool_call_argument_begin|>",
            close="<|tool_call_end|>",
            prefix="functions.",
            numbered=True,
        ),
        end="<|tool_calls_section_end|>",
        closing="<|tool_calls_section_end|>",
    ),
    # MiniMax M2 (template and docs/tool_calling_guide.md of the model); vLLM minimax_m2
    "minimax_m2": ToolFormat(
        begin="<minimax:tool_call>",
        sign=r"<minimax:tool_call>",
        call=NamedCall(
            TaggedArguments('<parameter name="', '">', "</parameter>"),
            before='<invoke name="',
            after='">',
            close="</invoke>",
        ),
        end="</minimax:tool_call>",
        opening="\n",
        joint="\n",
        closing="\n</minimax:tool_call>",
    ),
    # Mistral 7B v0.3 to Nemo (tokenizers v3)
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]",
        sign=r"\[TOOL_CALLS\]",
        other_sign=r"\[ARGS\]|\[CALL_ID\]",
        bare="[",
        opener="[",
        separator=",",
        end="]",
        opening="[",
        joint=", ",
        closing="]",
    ),
    # Mistral Small 3.2, Devstral, Ministral 3 (templates; tokenizers v11 and v13)
    "mistral_args": ToolFormat(
        begin="[TOOL_CALLS]",
        sign=r"\[TOOL_CALLS\][\s\S]*\[ARGS\]",
        call=NamedCall(JsonArguments(), after="[ARGS]", id="[CALL_ID]"),
        joint="[TOOL_CALLS]",
    ),
    # Llama 3.1 to 3.3 (templates); vLLM llama3_json
    "llama": ToolFormat(
        begin="<|python_tag|>",
        sign=r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*[\"']parameters\\?[\"']",
        other_sign=r"<function=|\[func_name1\(|<\|python_start\|>",
        call=ObjectCall("parameters"),
        bare="{",
        separator=";",
        joint="; ",
    ),
    # Llama 3.2 and 4 (prompt formats at llama.com), Olmo 3; vLLM pythonic, llama4_pythonic
    "pythonic": ToolFormat(
        begin="<|python_start|>",
        sign=r"<\|python_start\|>|\[func_name1\(",
        call=NamedCall(KeywordArguments("=", PYTHON), after="(", close=")"),
        bare="[",
        opener="[",
        separator=",",
        end="]",
        opening="[",
        joint=", ",
        closing="]",
    ),
    # LFM 2 and 2.5 (templates); vLLM lfm2
    "lfm2": ToolFormat(
        begin="<|tool_call_start|>",
        sign=r"<\|tool_call_start\|>|<\|tool_list_start\|>",
        call=NamedCall(KeywordArguments("=", PYTHON), after="(", close=")"),
        opener="[",
        separator=",",
        end="]<|tool_call_end|>",
        opening="[",
        joint=", ",
        closing="]<|tool_call_end|>",
    ),
    # Gemma 4 (template); vLLM gemma4
    "gemma4": ToolFormat(
        begin="<|tool_call>",
        sign=r"<\|tool_call>",
        call=NamedCall(KeywordArguments(":", GEMMA), before="call:", after="{", close="}"),
        end="<tool_call|>",
        joint="<tool_call|><|tool_call>",
        closing="<tool_call|>",
    ),
    # Nemotron Nano 2 (template)
    "nemotron_json": ToolFormat(
        begin="<TOOLCALL>",
        sign=r"<TOOLCALL>",
        opener="[",
        separator=",",
        end="]</TOOLCALL>",
        opening="[",
        joint=", ",
        closing="]</TOOLCALL>",
    ),
    # Apriel 1.5 and 1.6 (templates)
    "apriel": ToolFormat(
        begin="<tool_calls>",
        sign=r"<tool_calls>\[",
        opener="[",
        separator=",",
        end="]</tool_calls>",
        opening="[",
        joint=", ",
        closing="]</tool_calls>",
    ),
    # Granite 3 (templates); vLLM granite. Granite 4 writes as Hermes does.
    "granite": ToolFormat(
        begin="<|tool_call|>",
        sign=r"<\|tool_call\|>",
        opener="[",
        separator=",",
        end="]",
        opening="[",
        joint=", ",
        closing="]",
    ),
}

# Names of vLLM's and SGLang's parsers -> formats, of which the chat template chooses one. If it
# chooses none, the first.
PARSER_NAMES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in TOOL_FORMATS},
    "mistral": ("mistral", "mistral_args"),
    "granite": ("granite", "hermes"),
    **dict.fromkeys(("granite4", "qwen", "qwen25", "qwen2_5"), ("hermes",)),
    **dict.fromkeys(("qwen3_xml", "mimo", "step3p5"), ("qwen3_coder",)),
    **dict.fromkeys(("glm", "glm47", "glm4_moe"), ("glm45",)),
    **dict.fromkeys(("deepseekv3", "deepseek_r1"), ("deepseek_v3",)),
    "deepseekv31": ("deepseek_v31",),
    "deepseekv32": ("deepseek_v32",),
    "deepseekv4": ("deepseek_v4",),
    "minimax-m2": ("minimax_m2",),
    **dict.fromkeys(("llama3", "llama3_json", "llama4_json"), ("llama",)),
    **dict.fromkeys(("llama4_pythonic", "olmo3"), ("pythonic",)),
    **dict.fromkeys(("openai", "gpt-oss", "gpt_oss"), ("harmony",)),
    "harmony": ("harmony",),
    "none": ("none",),
}

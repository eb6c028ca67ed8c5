"""How a family of models writes reasoning and tool calls, recognised by its chat template."""

from dataclasses import dataclass

from nano_inference.serving.parsing.output import OutputParser, PlainParser

TOOL_FORMAT_NAMES = ("none", "hermes", "llama", "mistral")
REASONING_FORMAT_NAMES = ("none", "think")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes what is not content.

    Attributes:
        tools: the name of the tool-call format, or None: tool calls are not recognised.
        reasoning: the name of the reasoning format, or None: the model writes none, or it is not recognised.
    """

    tools: str | None = None
    reasoning: str | None = None


def chat_format(
    template: str | None, tool_format: str | None = None, reasoning_format: str | None = None
) -> ChatFormat:
    """The format of the models that this chat template belongs to.

    Args:
        template: Jinja source, or None where the model has none.
        tool_format: one of `TOOL_FORMAT_NAMES`, instead of what the template tells. None: the template decides.
        reasoning_format: one of `REASONING_FORMAT_NAMES`, likewise.

    Raises:
        ConfigError: there is no format of that name.
    """
    return ChatFormat()


def make_parser(format: ChatFormat, *, tools: bool, reasoning: bool, prompt_tail: str) -> OutputParser:
    """A parser for one sample.

    Args:
        format: of the model.
        tools: whether the request allows tool calls. False: they stay text.
        reasoning: whether reasoning is told apart. False: it stays text.
        prompt_tail: the last words of the prompt, special tokens written out: where the template has opened the
            reasoning already, the answer begins inside. Some 100 characters do.
    """
    return PlainParser()

"""What a model wrote, taken apart as it comes: reasoning, content and tool calls. Pure text, one
table row a family.
"""

from nano_inference.serving.parsing.formats import (
    REASONING_FORMAT_NAMES,
    REASONING_FORMATS,
    TOOL_FORMAT_NAMES,
    ChatFormat,
    chat_format,
    make_parser,
)
from nano_inference.serving.parsing.output import OutputParser, Parsed, ToolCallDelta

__all__ = [
    "REASONING_FORMATS",
    "REASONING_FORMAT_NAMES",
    "TOOL_FORMAT_NAMES",
    "ChatFormat",
    "OutputParser",
    "Parsed",
    "ToolCallDelta",
    "chat_format",
    "make_parser",
]

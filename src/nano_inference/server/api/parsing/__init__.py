"""Parsers of model output, which split it into reasoning, content and tool calls as it comes. Each
model family is one table row.
"""

from nano_inference.server.api.parsing.formats import (
    AT_ONCE,
    REASONING_FORMAT_NAMES,
    TOOL_FORMAT_NAMES,
    Behind,
    ChatFormat,
    chat_format,
    make_parser,
    markers_of,
    reasoning_before,
)
from nano_inference.server.api.parsing.output import OutputParser, Parsed, ToolCallDelta
from nano_inference.server.api.parsing.tool_parsers import Schemas

__all__ = [
    "AT_ONCE",
    "REASONING_FORMAT_NAMES",
    "TOOL_FORMAT_NAMES",
    "Behind",
    "ChatFormat",
    "OutputParser",
    "Parsed",
    "Schemas",
    "ToolCallDelta",
    "chat_format",
    "make_parser",
    "markers_of",
    "reasoning_before",
]

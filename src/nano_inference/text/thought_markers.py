"""Markers of thought by model family, recognized by the chat template."""

import re
from dataclasses import dataclass

from nano_inference.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """Notation of thought in a model family.

    Attributes:
        begin: Opening marker. A template may have written it already, at the end of the prompt.
        end: Closing marker.
    """

    begin: str
    end: str


THINK = ThoughtMarkers("<think>", "</think>")
ANALYSIS = ThoughtMarkers("<|channel|>analysis<|message|>", "<|end|>")  # harmony's channel
# pattern of the templates, by family
SIGNS = (
    (re.compile(r"<\|channel\|>(analysis|commentary|final)"), ANALYSIS),
    (re.compile(r"</?think>"), THINK),
)


def markers_of(tokenizer: Tokenizer) -> ThoughtMarkers | None:
    """Return the markers that a model writes around its thoughts, or None if it has none. The chat
    template names them. A model without a template has them as tokens.
    """
    template = tokenizer.chat_template or tokenizer.tool_template
    if template is None:
        names = {each.content for each in tokenizer.backend.get_added_tokens_decoder().values()}
        return THINK if THINK.end in names else None
    return next((markers for sign, markers in SIGNS if sign.search(template)), None)

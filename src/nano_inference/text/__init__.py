"""Text before and after the engine: tokenizer, chat templates, detokenizer, stop strings.

Imports only from the base modules.
Begin with: tokenizer.py, then detokenizer.py.
Tests: tests/text.
"""

from typing import TYPE_CHECKING

from nano_inference.system.lazy import lazy

if TYPE_CHECKING:
    from nano_inference.text.conversation import Conversation as Conversation
    from nano_inference.text.conversation import TokenSpan as TokenSpan
    from nano_inference.text.detokenizer import Detokenizer as Detokenizer
    from nano_inference.text.tokenizer import load_tokenizer as load_tokenizer

_MODULES = {
    "Conversation": "conversation",
    "Detokenizer": "detokenizer",
    "TokenSpan": "conversation",
    "load_tokenizer": "tokenizer",
}
__getattr__ = lazy(__name__, _MODULES)

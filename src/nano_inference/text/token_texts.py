"""Bytes and text of single tokens. A token may contain half a character, so text is not enough."""

import codecs
import re
from collections.abc import Iterable
from functools import cache

from tokenizers import decoders

from nano_inference.text.decoding_steps import byte_level_bytes
from nano_inference.text.detokenizer import decoder_types
from nano_inference.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Bytes and text of single token ids, cached.

    Attributes:
        bytes_of: Token id -> its UTF-8, or a part of it. A special token's bytes are its name.
            Unknown ids have none.
        text: Token id -> its text. If the bytes are not text: `bytes:` and the bytes as escapes,
            which are unique.
        longest: Length of the longest token of a byte-level vocabulary. None for others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        kinds = decoder_types(tokenizer)
        self._backend = backend
        self._decoder = backend.decoder
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._added = backend.get_added_tokens_decoder()
        self.bytes_of = cache(self._bytes_of)
        self.text = cache(self._text)
        self.longest = max(map(len, backend.get_vocab()), default=1) if self._byte_level else None

    def is_special(self, token_id: int) -> bool:
        """Return True if a token is special, so that texts omit it."""
        return token_id in self._added and self._added[token_id].special

    def _text(self, token_id: int) -> str:
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            reads_bytes = self._byte_level and not added.special  # as the decoder reads it
            return byte_level_bytes(added.content) if reads_bytes else added.content.encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(token)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return _in_the_middle(self._decoder, token).encode()


class Offsets:
    """Offsets of tokens in the text.

    Args:
        texts: Texts of the tokens.
        start: Offset of the first token in characters.
        shown: Source text of the tokens. Special tokens that occur in it have a width; None: no
            special token has one.
        special_tokens: Give all special tokens a width.
    """

    def __init__(
        self,
        texts: TokenTexts,
        start: int = 0,
        shown: str | None = None,
        *,
        special_tokens: bool = False,
    ) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._here = start
        self._shown = shown
        self._special_tokens = special_tokens

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens, in characters."""
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._here)
            if not self._texts.is_special(token_id) or self._writes_out(token_id):
                self._here += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return offsets

    def _writes_out(self, token_id: int) -> bool:
        shown = self._shown
        return self._special_tokens or (
            shown is not None and shown.startswith(self._texts.text(token_id), self._here)
        )


def _in_the_middle(decoder: decoders.Decoder | None, token: str) -> str:
    """Return the text of a token after another one. The first token may lose its space."""
    if decoder is None:
        return token
    before, after = decoder.decode(["x"]), decoder.decode(["x", token])
    return after[len(before) :] if after.startswith(before) else decoder.decode([token])

"""What single tokens say, as bytes: a token may hold half a character, which text cannot show."""

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
    """The bytes and the text of token ids, each by itself. Results are kept.

    Attributes:
        bytes_of: token id -> its UTF-8, or a part of it. Special tokens say their name; ids without
            a token say nothing.
        text: token id -> its text; where its bytes are not text, `bytes:` and the bytes as escapes,
            which no two such tokens share.
        longest: characters of the longest token of a byte-level vocabulary; None for others.
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
        """Whether texts leave it out."""
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
    """Where in the text each token begins, token by token.

    Args:
        texts: of the tokens.
        start: characters before the first.
        shown: the text that the tokens were made of. Special tokens that it writes out take room;
            without it none do.
        special_tokens: all of them do.
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
        """Offsets of the next tokens, in characters."""
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
    """What a token says that is not the first, which may lose its space."""
    if decoder is None:
        return token
    before, after = decoder.decode(["x"]), decoder.decode(["x", token])
    return after[len(before) :] if after.startswith(before) else decoder.decode([token])

"""What single tokens say, as bytes: a token may hold half a character, which text cannot show."""

import codecs
import re
from collections.abc import Iterable

from tokenizers import decoders

from nano_inference.text.detokenize import byte_level_bytes, decoder_types
from nano_inference.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The bytes and the text of token ids, each by itself. Results are kept.

    Args:
        tokenizer: whose tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        kinds = decoder_types(tokenizer)
        self._backend = backend
        self._decoder = backend.decoder
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._added = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._special = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.longest = max(map(len, backend.get_vocab()), default=1) if self._byte_level else None

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8, or a part of it. Special tokens say their name; ids without a token say
        nothing.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find(token_id)
        return known

    def text(self, token_id: int) -> str:
        """Its text; where its bytes are not text, `bytes:` and the bytes as escapes, which no two
        such tokens share.
        """
        known = self._texts.get(token_id)
        if known is None:
            data = self.bytes_of(token_id)
            try:
                known = data.decode()
            except UnicodeDecodeError:
                known = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether it is left out of texts."""
        return token_id in self._special

    def _find(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
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

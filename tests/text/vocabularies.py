"""Tiny tokenizers, one for each way that tokens become text. They only decode: every vocabulary is
a list of words.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nano_inference.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Spaces and word marks in every place, lone marks, U+FFFD itself, lookalikes of bytes,
# marks of other schemes.
PIECES = [
    *(
        "a",
        "b",
        "ab",
        "▁",
        "▁a",
        "▁▁",
        "a▁b▁",
        "",
        " ",
        "  ",
        " a",
        "a ",
        "é",
        "🙂",
        "\u0301",
        "\u200d",
        "\ufffd",
    ),
    *(
        "<0x+5>",
        "<0xZZ>",
        "<0x٣>",
        "<0x1>",
        "##a",
        "##",
        "a</w>",
        "</w>",
        "b</w>a",
        ".",
        "'",
        "n't",
        "|",
        "do not",
    ),
    *("Ã", "©", "Ġa", "Ċ", "x", "aaa", "aÃ", "ab xa"),
]
SPECIAL = ["<s>", "</s>"]


def tokenizer(words: Sequence[str], decoder: decoders.Decoder | None) -> Tokenizer:
    """Return a tokenizer of `words`, then one plain added token, one normalized, two special."""
    backend = Backend(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.decoder = decoder
    backend.add_tokens(
        [AddedToken("<tool 工具>", normalized=False), AddedToken("▁ADDED", normalized=True)]
    )
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, backend.get_vocab_size(), None, {}, None)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    token_id = tokenizer.backend.token_to_id(BYTES[byte])
    assert token_id is not None
    return token_id


_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]

BYTE_LEVEL = tokenizer(
    [*_ALPHABET, *(piece for piece in PIECES if piece not in _ALPHABET)], decoders.ByteLevel()
)
LLAMA = tokenizer([*PIECES, *BYTES], decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)]))
GEMMA = tokenizer([*PIECES, *BYTES], decoders.Sequence(_LLAMA))
_DECODERS = {
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "wordpiece, as it is": decoders.WordPiece(cleanup=False),
    "word ends": decoders.BPEDecoder(),
    "word ends, no suffix": decoders.BPEDecoder(suffix=""),
    "none": None,
    "replace by a pattern": decoders.Replace(Regex("[ab]+"), "-"),
    "bytes, then wordpiece": decoders.Sequence([decoders.ByteFallback(), decoders.WordPiece()]),
    "bytes, then metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "tokens stripped": decoders.Sequence([decoders.Strip("a", 2, 0), decoders.WordPiece()]),
    "bytes stripped": decoders.Sequence([decoders.ByteFallback(), decoders.Strip("\ufffd", 1, 0)]),
    "text stripped": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    ),
    "byte level, stripped": decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
    "nested": decoders.Sequence(
        [decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), decoders.Strip("a", 1, 0)]
    ),
    "whole text replaced": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "")]),
    "whole text, then bytes": decoders.Sequence(
        [decoders.WordPiece(), decoders.Fuse(), decoders.ByteLevel()]
    ),
    "ctc": decoders.CTC(pad_token="a"),
    "bytes, then ctc": decoders.Sequence([decoders.ByteFallback(), decoders.CTC()]),
}
ALL = {
    "byte level": BYTE_LEVEL,
    "llama": LLAMA,
    "gemma": GEMMA,
    **{name: tokenizer([*PIECES, *BYTES], decoder) for name, decoder in _DECODERS.items()},
}

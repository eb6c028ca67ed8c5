# ruff: noqa: RUF001 - the ambiguous letters are intended
"""Pre-tokenizer rules for byte-level merges, by llama.cpp's name (`tokenizer.ggml.pre`).

A rule lists splits as expressions of the tokenizers library, applied in order. Text between two
matches is a separate piece. The expressions are those of the models' own tokenizer.json.
"""

from typing import NamedTuple


class SplitRule(NamedTuple):
    """Pre-tokenization of text.

    Attributes:
        splits: Expressions, each applied to the pieces of the previous one.
        composes: True to normalize text to Unicode form C first.
        whole_words: True to use a piece that is a token directly, without merges.
        adds_bos: True if sequences begin with BOS unless the file says otherwise.
    """

    splits: tuple[str, ...]
    composes: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"


def _words(digits: str) -> str:
    """Return the expression of cl100k and its descendants, with this pattern for digits."""
    return f"{_CONTRACTION}|{_WORD}|{digits}|{_SYMBOLS}|{_LINES_AND_SPACE}"


def _cased_words(contraction: str, digits: str) -> str:
    """Return the expression of o200k and its descendants, which also split before capitals."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    start = r"[^\r\n\p{L}\p{N}]?"
    return "|".join(
        (
            f"{start}[{upper}]*[{lower}]+{contraction}",
            f"{start}[{upper}]+[{lower}]*{contraction}",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _LINES_AND_SPACE,
        )
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_HAN_AND_KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_LINES_AND_SPACE}"
)
# cased letters in DeepSeek's first tokenizers
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴ"
    "ᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN_TO_HANGUL = "[一-龥\u0800-一가-\ud7ff]+"

_LLAMA3 = SplitRule((_words(_THREE_DIGITS),), whole_words=True, adds_bos=True)
_CL100K = SplitRule((_words(_THREE_DIGITS),))
_O200K = SplitRule((_cased_words(f"{_CONTRACTION}?", _THREE_DIGITS),))
_PLAIN_GPT2 = SplitRule((_GPT2,))
_SINGLE_DIGITS = SplitRule((_DIGIT, _GPT2))
_COARSE = r" ?[^(\s|.,!?…。，、।۔،)]+"

SPLIT_RULES: dict[str, SplitRule] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K),
    "qwen2": SplitRule((_words(_DIGIT),), composes=True),
    **dict.fromkeys(
        (
            *("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"),
            *("solar-open", "grok-2"),
        ),
        SplitRule((_words(_DIGIT),)),
    ),
    "qwen35": SplitRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACE}",
        ),
        composes=True,
    ),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert"),
            *("jais", "trillion", "granite-docling", "exaone4"),
        ),
        _PLAIN_GPT2,
    ),
    **dict.fromkeys(("olmo", "mpt"), _PLAIN_GPT2._replace(composes=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _SINGLE_DIGITS,
    ),
    "command-r": _SINGLE_DIGITS._replace(composes=True),
    "tekken": SplitRule((_cased_words("", _DIGIT),), whole_words=True, adds_bos=True),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _HAN_TO_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, _DIGIT)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        SplitRule((_THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK_V3)),
    ),
    "seed-coder": SplitRule(
        (f"{_CONTRACTION}|{_WORD}|{_DIGIT}| ?[^\\s\\p{{L}}\\p{{N}}\\r\\n]+|{_LINES_AND_SPACE}",)
    ),
    "exaone-moe": SplitRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        SplitRule(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    "superbpe": SplitRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), SplitRule((_COARSE,))),
    "viking": SplitRule((_COARSE, _DIGIT)),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
# rule for older files without a name, as in transformers
WITHOUT_A_NAME = _PLAIN_GPT2

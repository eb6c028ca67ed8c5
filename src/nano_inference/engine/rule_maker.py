"""`RuleMaker`: the rules of requests, from the model's tokenizer."""

from functools import cached_property

from nano_inference.engine.requests import RequestChecks
from nano_inference.errors import InvalidRequest
from nano_inference.sampling.token_rules import BadWords, Rules, ThoughtBudget
from nano_inference.structured.mask_bits import cut_to, mask_of
from nano_inference.text.thought_markers import ThoughtMarkers, markers_of
from nano_inference.text.token_texts import TokenTexts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import SamplingParams


class RuleMaker:
    """Makes the rules of one engine's requests.

    Args:
        checks: Limits of the engine, and its tokenizer.
    """

    def __init__(self, checks: RequestChecks) -> None:
        self._checks = checks

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._checks.tokenizer)

    @cached_property
    def _unlimited(self) -> ThoughtBudget | None:
        """Thoughts of the model without a limit, or None if the model has no thoughts."""
        tokenizer, texts = self._checks.tokenizer, self._texts
        markers = markers_of(tokenizer)
        if markers is None:
            return None
        closing_ids = tuple(_encode(tokenizer, markers.end))
        if markers.end.encode() not in b"".join(map(texts.bytes_of, closing_ids)):
            return None  # the vocabulary cannot write it
        return ThoughtBudget(
            most=2**62,
            opens=_opening(tokenizer, markers),
            closes=markers.end.encode(),
            closing_ids=closing_ids,
            eos_token_ids=frozenset(self._checks.spec.eos_token_ids),
            bytes_of=texts.bytes_of,
        )

    def of(self, params: SamplingParams) -> Rules:
        """Return the rules of a request. Raises `InvalidRequest`."""
        size = self._checks.spec.vocab_size
        drawable = range(size) if params.allowed_token_ids is None else params.allowed_token_ids
        rules = Rules(
            cut_to(mask_of(drawable), size), self._thought(params), self._bad_words(params)
        )
        if not rules.others.any():
            raise InvalidRequest(
                f"bad_words bans every {'' if params.allowed_token_ids is None else 'allowed '}"
                "token, so no token can be drawn; remove a word."
            )
        return rules

    def _thought(self, params: SamplingParams) -> ThoughtBudget | None:
        most = params.thinking_token_budget
        if most is None:
            return None
        self._checks.need_tokenizer("thinking_token_budget")
        thought = self._unlimited
        if thought is None:
            raise InvalidRequest(
                f"thinking_token_budget={most} needs a model whose chat template has thoughts; "
                "omit it."
            )
        length = len(thought.closing_ids)
        if most + length >= params.max_tokens:
            fits = params.max_tokens - length - 1
            remedy = f"set at most {fits}, or " if fits >= 0 else ""
            raise InvalidRequest(
                f"thinking_token_budget={most}, the closing marker of {length} "
                f"token{'s' * (length > 1)} and an answer exceed max_tokens={params.max_tokens}; "
                f"{remedy}raise max_tokens to at least {most + length + 1}."
            )
        allowed = params.allowed_token_ids
        if allowed is not None and (missing := set(thought.closing_ids) - allowed):
            raise InvalidRequest(
                f"thinking_token_budget={most} forces token id {min(missing)}, which is not among "
                "allowed_token_ids; add it."
            )
        return ThoughtBudget(**{**vars(thought), "most": most})

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        if not params.bad_words:
            return None
        tokenizer = self._checks.need_tokenizer("bad_words")
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bare = word.lstrip() or word
            words += (tuple(_encode(tokenizer, text)) for text in (bare, " " + bare))
        return BadWords([word for word in words if word])


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except Exception as problem:  # a lone surrogate, or the library's bare Exception
        raise InvalidRequest(f"{text!r} cannot be encoded: {problem}; change it.") from None


def _opening(tokenizer: Tokenizer, markers: ThoughtMarkers) -> tuple[int, ...] | bytes:
    """Return the ids of the opening marker if a token of its own begins it: a text that only shows
    the marker has other ids. Otherwise return its bytes.
    """
    ids = tokenizer.encode(markers.begin)
    is_own = bool(ids) and ids[0] in tokenizer.backend.get_added_tokens_decoder()
    return tuple(ids) if is_own else markers.begin.encode()

"""From what callers hand in to checked sequences."""

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from nano_inference.core.sequence import (
    POLICY,
    CheckedRequest,
    GrowingMask,
    SampleGroup,
    Sequence,
    Sequences,
    ServedAdapter,
)
from nano_inference.core.versions import being_merged
from nano_inference.engine.requests import (
    Params,
    RequestChecks,
    is_text,
    many_prompts,
    params_for,
)
from nano_inference.errors import AdapterNotFound, InvalidRequest, VersionGone
from nano_inference.fields.options import is_whole
from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.token_masks import TokenMasks
from nano_inference.text.detokenizer import OutputText
from nano_inference.text.token_texts import TokenTexts
from nano_inference.types import Limits, SamplingParams


class Intake:
    """Makes sequences. Nothing of the engine's state changes if a request is refused.

    Args:
        checks: the engine's limits.
        sequences: where sequence ids come from.
        numerics: fingerprint of the engine; a sample of another one is not gone on with.
        seed: source of fresh request seeds; None: entropy.
        take_routes: called with each sequence whose routed experts are wanted, as it ends; None:
            there are none.
    """

    def __init__(
        self,
        checks: RequestChecks,
        sequences: Sequences,
        numerics: str,
        seed: int | None,
        take_routes: Callable[[Sequence], None] | None,
    ) -> None:
        self.checks = checks
        self.live = sequences
        self.numerics = numerics
        self._num_requests = 0
        self._counting = threading.Lock()
        backend = checks.config.grammar_backend
        self.grammars = GrammarCompiler(lambda: vocabulary_of(checks), backend)
        self.token_masks = TokenMasks(self.grammars)
        # False: who hands in requests has checked their grammars, apart from the steps
        self.checks_grammars = True
        self.take_routes = take_routes
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    def new_request_id(self) -> int:
        """An id that was never used."""
        with self._counting:
            self._num_requests += 1
            return self._num_requests - 1

    def request_ids(self, given: int | Iterable[int] | None) -> frozenset[int] | None:
        """Ids of requests, live or ended; None: all. Raises `InvalidRequest` for one that was never
        given out.
        """
        if given is None:
            return None
        ids = frozenset([given] if isinstance(given, int) else given)
        for each in ids:
            if not isinstance(each, int) or not 0 <= each < self._num_requests:
                raise InvalidRequest(
                    f"{each!r} is not the id of a request; {self._num_requests} were made, from 0 "
                    "on."
                )
        return ids

    def sequences(
        self,
        prompts: Any,
        sampling_params: Params,
        num_samples: int,
        stream: bool,
        num_wanted: int | None = None,
        *,
        embeds: bool = False,
    ) -> list[Sequence]:
        """One request a prompt; raises as `sequence` does."""
        many, one = many_prompts(prompts), self.sequence
        pairs = zip(many, params_for(sampling_params, len(many)), strict=True)
        return [
            one(prompt, each, num_samples, stream=stream, embeds=embeds, num_wanted=num_wanted)
            for prompt, each in pairs
        ]

    def sequence(
        self,
        prompt: Any,
        params: SamplingParams,
        num_samples: int,
        *,
        stream: bool,
        request_id: int | None = None,
        embeds: bool = False,
        **limits: Unpack[Limits],
    ) -> Sequence:
        """A new request. Raises `InvalidRequest` (`VersionGone` for an `exact_version`) or
        `RequestTooLarge`. `embeds`: see `RequestChecks.require`.
        """
        checks = self.checks
        self.request_ids(request_id)
        token_ids = checks.token_ids(prompt)
        most_mask_ids = checks.require(
            *(len(token_ids), params, num_samples, limits.get("max_entries")), embeds=embeds
        )
        for name in ("min_version", "max_staleness", "exact_version"):
            _require_version(name, limits.get(name))
        self._require_not_gone(limits.get("exact_version"))
        num_wanted = limits.get("num_wanted")
        _require_wanted(num_wanted, num_samples)
        stop_ids = checks.stop_ids(params)
        grammar, adapter = self.grammar_of(params), self.adapter_of(params.adapter)
        text = None
        if params.stop or is_text(prompt):
            text = OutputText(checks.need_tokenizer("a stop string"), params.stop)
        request = CheckedRequest(
            request_id=self.new_request_id() if request_id is None else request_id,
            num_prompt_tokens=len(token_ids),
            params=params,
            stop_ids=stop_ids,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            min_version=limits.get("min_version"),
            exact_version=limits.get("exact_version"),
            max_staleness=limits.get("max_staleness"),
            group=SampleGroup(num_wanted) if num_wanted is not None else None,
            scored=range(len(token_ids) - 1) if params.prompt_logprobs else range(0),
            num_best=params.prompt_top_logprobs,
            streaming=stream,
            at_end=self.take_routes if params.routed_experts else None,
        )
        return Sequence(
            self.live.new_id(),
            request,
            token_ids,
            num_samples,
            output_text=text,
            mask=GrowingMask(most_mask_ids),
            grammar=grammar,
            adapter=adapter,
        )

    def adapter_of(self, name: str | None) -> ServedAdapter | None:
        """The newest version of the adapter that a request asks for; None: it asks for none. What
        that means while one is merged, `settle_adapter` says. Raises `AdapterNotFound` and
        `InvalidRequest`.
        """
        if name is None:
            return None
        if (merging := self.live.merging) is not None:
            raise InvalidRequest(
                f"adapter={name!r} cannot be computed now: {being_merged(merging)}; ask again "
                "later."
            )
        if (merged := self.live.merged) not in (None, name):
            raise InvalidRequest(
                f"adapter={name!r} cannot be computed while adapter {merged!r} is merged into the "
                "weights; unmerge_adapter() first."
            )
        if (found := self.live.adapters.get(name)) is None:
            loaded = ", ".join(map(repr, sorted(self.live.adapters))) or "none is"
            raise AdapterNotFound(f"adapter={name!r} is not loaded; these are: {loaded}.")
        return found

    def grammar_of(
        self, params: SamplingParams, token_ids: Iterable[int] = ()
    ) -> GrammarState | None:
        """The state of a sample's grammar, if it has one, behind the tokens that it has already.
        Raises `InvalidRequest`.
        """
        if params.grammar is None:
            return None
        if self.checks_grammars:
            self.grammars.check(params.grammar)
        state = GrammarState(params.grammar, token_ids, params.allowed_token_ids)
        state.compiled = self.grammars.begin(params.grammar)  # others may push it out meanwhile
        return state

    def _require_not_gone(self, version: int | None) -> None:
        serving = self.live.versions[POLICY]
        if version is not None and version < serving:
            raise VersionGone(f"exact_version={version} is gone; this engine serves {serving}.")


def vocabulary_of(checks: RequestChecks) -> Vocabulary:
    """The tokens that grammars of an engine are about. Raises `InvalidRequest`."""
    tokenizer, spec = checks.need_tokenizer("a grammar"), checks.spec
    if not spec.eos_token_ids:
        raise InvalidRequest("a grammar needs a model that names an end-of-sequence token.")
    return Vocabulary(
        tokenizer.backend.to_str(),
        max(tokenizer.vocab_size, spec.vocab_size),
        spec.vocab_size,
        tuple(sorted(spec.eos_token_ids)),
        TokenTexts(tokenizer).bytes_of,
    )


def _require_version(name: str, value: int | None) -> None:
    if value is not None and not is_whole(value, 0):
        raise InvalidRequest(f"{name}={value!r} must be a whole number, or None.")


def _require_wanted(num_wanted: Any, num_samples: int) -> None:
    if num_wanted is not None and not (is_whole(num_wanted, 1) and num_wanted <= num_samples):
        raise InvalidRequest(
            f"num_wanted={num_wanted!r} must be a whole number from 1 to num_samples={num_samples}."
        )

"""Conversion of a caller's input to checked sequences."""

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from nano_inference.core.logits_processors import LogitsProcessors
from nano_inference.core.named_ids import prompt_scoring
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
from nano_inference.engine.rule_maker import RuleMaker
from nano_inference.errors import AdapterNotFound, InvalidRequest, VersionGone
from nano_inference.fields.options import is_whole
from nano_inference.sampling.token_rules import TokenRules
from nano_inference.structured.backend import Vocabulary
from nano_inference.structured.compiler import GrammarCompiler
from nano_inference.structured.matching import GrammarState
from nano_inference.structured.token_masks import TokenMasks
from nano_inference.text.detokenizer import OutputText
from nano_inference.text.token_texts import TokenTexts
from nano_inference.types import Limits, SamplingParams


class Intake:
    """Maker of sequences. A rejected request changes nothing in the engine's state.

    Args:
        checks: Limits of the engine.
        sequences: Sequences of the engine, which hand out sequence ids.
        numerics: Fingerprint of the engine. Samples of another one cannot be resumed.
        seed: Seed from which requests without a seed get theirs. None uses the operating system's
            entropy.
        take_routes: Function called with each sequence whose routed experts are requested, at its
            end. None if the engine does not record them.
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
        self.rule_maker = RuleMaker(checks)
        self.processors = LogitsProcessors()
        # False if the caller has already checked the grammars outside the stepping thread
        self.checks_grammars = True
        self.take_routes = take_routes
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    def new_request_id(self) -> int:
        """Return a request id that was never used."""
        with self._counting:
            self._num_requests += 1
            return self._num_requests - 1

    def request_ids(self, request_ids: int | Iterable[int] | None) -> frozenset[int] | None:
        """Return ids of live or ended requests as a set. None stands for all requests. Raises
        `InvalidRequest` for an id that was never assigned.
        """
        if request_ids is None:
            return None
        ids = frozenset([request_ids] if isinstance(request_ids, int) else request_ids)
        for request_id in ids:
            if not isinstance(request_id, int) or not 0 <= request_id < self._num_requests:
                last = self._num_requests - 1
                valid = f"valid ids are 0 to {last}" if last >= 0 else "no request was added yet"
                raise InvalidRequest(f"request id {request_id!r} does not exist; {valid}.")
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
        """Return one request per prompt. Raises the same errors as `sequence`."""
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
        """Return a new request. `embeds` is as in `RequestChecks.require`. Raises `InvalidRequest`,
        `VersionGone` for an `exact_version` that was replaced, or `RequestTooLarge`.
        """
        checks = self.checks
        self.request_ids(request_id)
        token_ids = checks.token_ids(prompt)
        most_mask_ids = checks.require(
            *(len(token_ids), params, num_samples, limits.get("max_entries")), embeds=embeds
        )
        for name in ("min_version", "max_staleness", "exact_version", "turn_of"):
            _require_whole(name, limits.get(name))
        self._require_not_gone(limits.get("exact_version"))
        num_wanted = limits.get("num_wanted")
        _require_wanted(num_wanted, num_samples)
        stop_ids = checks.stop_ids(params)
        self.processors.require(params.logits_processors)
        grammar, adapter = self.grammar_of(params), self.adapter_of(params.adapter)
        rules = self.rules_of(params, len(token_ids))
        if rules is not None:
            rules.forced(token_ids)  # read the prompt now, not within a step
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
            **prompt_scoring(params, token_ids),
            streaming=stream,
            at_end=self.take_routes if params.routed_experts else None,
            turn_of=limits.get("turn_of"),
        )
        return Sequence(
            self.live.new_id(),
            request,
            token_ids,
            num_samples,
            output_text=text,
            mask=GrowingMask(most_mask_ids),
            grammar=grammar,
            rules=rules,
            adapter=adapter,
        )

    def rules_of(self, params: SamplingParams, num_prompt_tokens: int) -> TokenRules | None:
        """Return the rules of a sample's own tokens, or None without rules. Raises
        `InvalidRequest`.
        """
        if not params.has_rules:
            return None
        return TokenRules(self.rule_maker.of(params), num_prompt_tokens)

    def adapter_of(self, name: str | None) -> ServedAdapter | None:
        """Return the newest version of the adapter with this name, or None without a name. Raises
        `AdapterNotFound` and `InvalidRequest`.

        `settle_adapter` decides how a merged adapter is applied.
        """
        if name is None:
            return None
        if (merging := self.live.merging) is not None:
            raise InvalidRequest(
                f"adapter={name!r} is not available now: {being_merged(merging)}; try again later."
            )
        if (merged := self.live.merged) not in (None, name):
            raise InvalidRequest(
                f"adapter={name!r} is not available while adapter {merged!r} is merged into the "
                "weights; call unmerge_adapter() first."
            )
        if (adapter := self.live.adapters.get(name)) is None:
            loaded = ", ".join(map(repr, sorted(self.live.adapters))) or "none"
            raise AdapterNotFound(f"adapter={name!r} is not loaded; loaded adapters: {loaded}.")
        return adapter

    def grammar_of(
        self, params: SamplingParams, token_ids: Iterable[int] = ()
    ) -> GrammarState | None:
        """Return the state of a sample's grammar after its existing tokens, or None without a
        grammar. Raises `InvalidRequest`.
        """
        if params.grammar is None:
            return None
        if self.checks_grammars:
            self.grammars.check(params.grammar)
        state = GrammarState(params.grammar, token_ids, params.allowed_token_ids)
        state.compiled = self.grammars.begin(params.grammar)  # others may evict it meanwhile
        return state

    def _require_not_gone(self, version: int | None) -> None:
        serving = self.live.versions[POLICY]
        if version is not None and version < serving:
            raise VersionGone(
                f"exact_version={version} was replaced; this engine serves version {serving}."
            )


def vocabulary_of(checks: RequestChecks) -> Vocabulary:
    """Return the vocabulary that grammars are compiled for. Raises `InvalidRequest`."""
    tokenizer, spec = checks.need_tokenizer("a grammar"), checks.spec
    if not spec.eos_token_ids:
        raise InvalidRequest("a grammar needs a model with an end-of-sequence token.")
    return Vocabulary(
        tokenizer.backend.to_str(),
        max(tokenizer.vocab_size, spec.vocab_size),
        spec.vocab_size,
        tuple(sorted(spec.eos_token_ids)),
        TokenTexts(tokenizer).bytes_of,
    )


def _require_whole(name: str, value: int | None) -> None:
    if value is not None and not is_whole(value, 0):
        raise InvalidRequest(f"{name}={value!r} must be a non-negative integer or None.")


def _require_wanted(num_wanted: Any, num_samples: int) -> None:
    if num_wanted is not None and not (is_whole(num_wanted, 1) and num_wanted <= num_samples):
        raise InvalidRequest(
            f"num_wanted={num_wanted!r} must be an integer from 1 to num_samples={num_samples}."
        )

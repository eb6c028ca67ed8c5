"""Kept blocks of a prompt: brought back before its request, and let go after the last one."""

from collections.abc import Callable, Iterable

from nano_inference.core.sequence import POLICY, CheckedRequest, Sequence
from nano_inference.engine.intake import Intake
from nano_inference.engine.shared_loop import SharedLoop
from nano_inference.errors import InvalidRequest
from nano_inference.types import SamplingParams


class KeptPrompts:
    """Operations on the kept blocks of prompts, between steps. Any thread may use it."""

    def __init__(self, shared: SharedLoop, intake: Intake) -> None:
        self._shared, self._intake = shared, intake

    def prefetch(
        self, prompt: Iterable[int], adapter: str | None = None, cache_salt: str | None = None
    ) -> int:
        """Bring a prompt's kept blocks back from files, as its request would. Return the number of
        its tokens that are cached in memory afterwards.

        A step waits while files are read. Raises `InvalidRequest`, also while the KV cache is
        asleep.
        """
        seq, num_cached = self._sequence(prompt, adapter, cache_salt), 0

        def read() -> None:
            nonlocal num_cached
            num_cached = self._shared.loop.prefetch(seq)

        self._between_steps(read)
        return num_cached

    def release(
        self,
        prompt: Iterable[int],
        start: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Stop keeping a prompt's blocks, the last first, down to position `start` and to the first
        block that another kept prompt continues. Return the number of blocks let go. Raises
        `InvalidRequest`.
        """
        seq = self._sequence(prompt, adapter, cache_salt)
        with self._shared.lock:
            return self._shared.loop.let_go(seq, start)

    def _sequence(
        self, prompt: Iterable[int], adapter: str | None, cache_salt: str | None
    ) -> Sequence:
        self._shared.require_alive()
        ids, served = self._intake.checks.token_ids(prompt), self._intake.adapter_of(adapter)
        params = SamplingParams(max_tokens=1, adapter=adapter, cache_salt=cache_salt)
        live = self._intake.live
        return Sequence(live.new_id(), CheckedRequest(0, len(ids), params), ids, adapter=served)

    def _between_steps(self, act: Callable[[], None]) -> None:
        with self._shared.lock:
            if "kv_cache" in self._shared.life.asleep:
                raise InvalidRequest("the KV cache is asleep; call wake() first.")
            self._shared.between_steps(POLICY, act)

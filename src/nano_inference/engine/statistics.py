"""`EngineStats` of a loop and what it runs on."""

from nano_inference.engine.loop import EngineLoop
from nano_inference.engine.runner import ModelRunner
from nano_inference.types import EngineStats


def collect(loop: EngineLoop, runner: ModelRunner) -> EngineStats:
    """Counters since the engine was built, and its state now."""
    cache, sequences = loop.cache, loop.sequences
    seconds = loop.clock.seconds
    times = [(busy / 1e9, waiting / 1e9) for busy, waiting in runner.rank_times()]
    for_samples = loop.clock.nanoseconds["wait"] / 1e9  # that rank 0 waited
    return EngineStats(
        num_waiting=len(sequences.waiting),
        num_running=len(sequences.running),
        num_held=len(sequences.held),
        num_free_blocks=cache.num_free_blocks(),
        num_blocks=cache.num_blocks,
        kv_leaked_blocks=loop.num_leaked_blocks,
        kv_use=cache.share_in_use(),
        num_steps=loop.num_steps,
        num_preemptions=loop.num_preemptions,
        tokens_computed=runner.tokens_computed,
        prompt_tokens_computed=runner.prompt_tokens_computed,
        prompt_tokens_cached=loop.num_cached_tokens,
        hit_rate=loop.num_cached_tokens
        / max(loop.num_cached_tokens + runner.prompt_tokens_computed, 1),
        prompt_tokens=loop.num_prompt_tokens,
        prompt_tokens_queried=loop.num_queried_tokens,
        completion_tokens=loop.num_completion_tokens,
        tokens_per_second=loop.num_completion_tokens / seconds if seconds else 0.0,
        step_microseconds=loop.clock.microseconds(loop.num_steps),
        ranks_busy=tuple(busy for busy, _ in times),
        ranks_waiting=tuple(
            waiting + for_samples * (rank == 0) for rank, (_, waiting) in enumerate(times)
        ),
    )

"""Make traces with the published statistics of coding agents, in Weka's format.

The defaults are those that SemiAnalysis published for its AgentX traces of Claude Code: medians of
43 turns, 142,000 prompt tokens and 444 output tokens per turn, more than 96 % of them in a cache
without limits, subagents in 44 % of the sessions, and waits for tools that are below 1 second for
86 % of the turns and below 10 seconds for 95 %.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "recorded"
# Lengths as shares of the median prompt.
_SYSTEM = 0.16  # tools and system prompt, equal in all sessions
_ADDED = 0.017  # new tokens of a turn: the previous answer and a tool's result
_SHORTEST = 0.3  # first prompt
_LIMIT = 1.75  # longest prompt, after which the agent compacts its context
_COMPACTED = 0.5  # prompt after a compaction
_SUBAGENT = 0.25  # first prompt of a subagent
_SPREAD = 0.7  # sigma of lognormal lengths
# Waits: upper ends in seconds, and the share of the turns below each.
_WAITS = ((0.02, 0.0), (1.0, 0.86), (10.0, 0.95), (120.0, 1.0))


@dataclass(frozen=True)
class Statistics:
    """Statistics of the sessions.

    Attributes:
        turns: Median of turns per session.
        input_tokens: Median of prompt tokens per turn.
        output_tokens: Median of output tokens per turn.
        subagents: Share of sessions with subagents.
        block_size: Tokens per block. 0: 64, or fewer for short prompts.
    """

    turns: int = 43
    input_tokens: int = 142_000
    output_tokens: int = 444
    subagents: float = 0.44
    block_size: int = 0

    @property
    def block(self) -> int:
        return self.block_size or max(1, min(64, self.input_tokens // 256))


@dataclass
class _Agent:
    """The blocks of one agent's context, whose first ones are shared."""

    about: Statistics
    rng: random.Random
    new_ids: Iterator[int]
    ids: list[int] = field(default_factory=list[int])

    def start(self, share: float) -> None:
        """Begin with the system prompt and further blocks up to a share of the median prompt."""
        count = self._blocks(share * self.about.input_tokens)
        system = self._blocks(_SYSTEM * self.about.input_tokens)
        self.ids = list(range(min(system, count)))
        self.extend(count - len(self.ids))

    def extend(self, blocks: int) -> None:
        self.ids += itertools.islice(self.new_ids, max(blocks, 0))

    def grow(self) -> None:
        """Append the tokens of one more turn, or compact the context."""
        if len(self.ids) * self.about.block > _LIMIT * self.about.input_tokens:
            self.start(_COMPACTED)
            return
        self.extend(self._blocks(self._around(_ADDED * self.about.input_tokens)))

    def request(self, now: float, wait: float) -> dict[str, Any]:
        output = max(1, round(self._around(self.about.output_tokens)))
        return {
            "t": round(now, 3),
            "type": "s",
            "model": MODEL,
            "in": len(self.ids) * self.about.block,
            "out": output,
            "hash_ids": list(self.ids),
            "api_time": round(0.5 + output / 100, 3),
            "think_time": round(wait, 3),
        }

    def _around(self, median: float) -> float:
        return self.rng.lognormvariate(math.log(max(median, 1e-9)), _SPREAD)

    def _blocks(self, tokens: float) -> int:
        return max(1, round(tokens / self.about.block))


def sessions(count: int, about: Statistics, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield sessions. Equal seeds give equal sessions."""
    new_ids = itertools.count(about.input_tokens)  # above the ids of the system prompt
    for index in range(count):
        rng = random.Random(f"{seed}, {index}")
        yield {
            "id": f"session-{seed}-{index}",
            "models": [MODEL],
            "block_size": about.block,
            "hash_id_scope": "global",
            "system_tokens": max(1, round(_SYSTEM * about.input_tokens / about.block))
            * about.block,
            # as many sessions with subagents as the share says, evenly spread
            "requests": _session(
                about,
                rng,
                new_ids,
                has_subagents=int((index + 1) * about.subagents) > int(index * about.subagents),
            ),
        }


def _session(
    about: Statistics, rng: random.Random, new_ids: Iterator[int], *, has_subagents: bool
) -> list[dict[str, Any]]:
    turns = max(2, round(rng.lognormvariate(math.log(about.turns), _SPREAD)))
    agent = _Agent(about, rng, new_ids)
    # high enough that the median over all turns, also of short subagents, is the median prompt
    agent.start(max(_SHORTEST, 1.25 - _ADDED * math.exp(_SPREAD**2 / 2) * about.turns / 2))
    spawns = rng.randint(1, 3) if has_subagents else 0
    spawning = {rng.randrange(turns - 1) for _ in range(spawns)}
    requests: list[dict[str, Any]] = []
    now = 0.0
    for index in range(turns):
        wait = tool_wait(rng) if index else 0.0
        now += wait
        request = agent.request(now, wait)
        requests.append(request)
        now += request["api_time"]
        if index in spawning:
            children = [
                _subagent(about, rng, new_ids, now, f"agent-{index}-{number}")
                for number in range(rng.randint(1, 3))
            ]
            requests += children
            now = max(_end(child) for child in children)
        agent.grow()
    return requests


def _subagent(
    about: Statistics, rng: random.Random, new_ids: Iterator[int], now: float, name: str
) -> dict[str, Any]:
    agent = _Agent(about, rng, new_ids)
    agent.start(_SUBAGENT)
    requests: list[dict[str, Any]] = []
    began = now
    for index in range(max(1, round(rng.lognormvariate(math.log(about.turns / 6), _SPREAD)))):
        wait = tool_wait(rng) if index else 0.0
        requests.append(agent.request(now + wait, wait))
        now += wait + requests[-1]["api_time"]
        agent.grow()
    return {
        "t": round(began, 3),
        "type": "subagent",
        "agent_id": name,
        "subagent_type": "Explore",
        "status": "completed",
        "models": [MODEL],
        "requests": requests,
    }


def _end(subagent: dict[str, Any]) -> float:
    last = subagent["requests"][-1]
    return last["t"] + last["api_time"]


def tool_wait(rng: random.Random) -> float:
    """Draw the seconds that a tool takes."""
    share = rng.random()
    for (low, before), (high, after) in itertools.pairwise(_WAITS):
        if share < after:
            within = (share - before) / (after - before)
            return low * (high / low) ** within
    return _WAITS[-1][0]

"""From a config to an engine of several ranks: start the others, let all build their parts, agree,
be ready.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import nano_inference
from nano_inference.config import EngineConfig
from nano_inference.engine.assembly import Parts, assemble, plan_engine
from nano_inference.engine.backends import choose_device
from nano_inference.engine.ranks.build import config_here, digest_of, least, process_groups, rank_of
from nano_inference.engine.ranks.crew import Crew
from nano_inference.engine.ranks.launcher import Handle, Launcher, LocalLauncher
from nano_inference.engine.ranks.meeting import Meeting
from nano_inference.engine.ranks.messages import Build, Size
from nano_inference.engine.ranks.runner import RankedRunner
from nano_inference.engine.transports.group import serve_store
from nano_inference.errors import ConfigError, RankLost, WeightUpdateError
from nano_inference.models.shares import mesh_of

logger = logging.getLogger("nano_inference")

MEET_SECONDS = 120.0  # for the others to start


def assemble_ranks(
    config: EngineConfig, launcher: Launcher | None = None, meet_seconds: float = MEET_SECONDS
) -> Parts:
    """Load rank 0's part of everything that a config names, and have all other ranks load theirs.

    Args:
        config: of the engine; its mesh has more than one rank.
        launcher: starts the others; None: here.
        meet_seconds: that these may take to come.

    Raises `ConfigError` or `ModelLoadError`, with all ranks ended.
    """
    launcher = launcher if launcher is not None else LocalLauncher()
    world_size = mesh_of(config).world_size
    ranks_here = launcher.ranks_here(world_size)
    own = config_here(config, ranks_here, 0)
    plan = plan_engine(own)  # what is wrong with the config is wrong before anybody starts
    meeting = Meeting(launcher, world_size, nano_inference.__version__)
    handles: Sequence[Handle] = []
    crew: Crew | None = None
    try:
        handles = launcher.start(meeting.begins())
        crew = Crew(meeting.collect(handles, meet_seconds), handles, config.rank_timeout)
        where, _store = _place_to_meet(meeting, launcher)  # the store lives until all have met
        build = Build(
            config,
            digest_of(plan),
            plan.numerics.fingerprint,
            where,
            ranks_here,
            config.rank_timeout,
        )
        crew.begin(build)
        parts = _built(own, crew, where, ranks_here, launcher.host or "")
        crew.require_built()
        return parts
    except BaseException as problem:
        if crew is not None:
            crew.kill()
        for handle in handles:
            with suppress(OSError):
                if handle.alive():
                    handle.kill()
        if isinstance(problem, RankLost):
            raise ConfigError(f"{problem}, while the engine was built.") from problem
        raise
    finally:
        meeting.close()


def _built(config: EngineConfig, crew: Crew, where: str, ranks_here: int, host: str) -> Parts:
    """Rank 0's part. What keeps another rank from having its own is raised instead of what that
    leads to here.
    """

    def agree(size: Size) -> Size:
        agreed = least([size, *crew.sizes()])
        crew.tell(agreed)
        return agreed

    try:
        make, groups = process_groups(where, 0, choose_device(config.device), crew.timeout, host)
        parts = assemble(config, rank=rank_of(config, 0, ranks_here, make, agree))
    except RankLost as problem:
        crew.require_no_refusal()
        raise crew.explain(problem) from problem
    runner = RankedRunner(parts.runner, crew, groups, parts.cache.units)
    return replace(parts, runner=runner)


def _place_to_meet(meeting: Meeting, launcher: Launcher) -> tuple[str, Any]:
    """Where process groups meet: a file in a folder that is ours alone, or a store on the
    network.
    """
    if meeting.folder is not None:
        return f"file:{meeting.folder}/groups", None
    assert launcher.host is not None
    try:
        store = serve_store((launcher.host, 0), MEET_SECONDS)
    except WeightUpdateError as problem:
        raise ConfigError(f"the ranks cannot meet: {problem}") from problem
    return f"tcp:{launcher.host}:{store.port}", store

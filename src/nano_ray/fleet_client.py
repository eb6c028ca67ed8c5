"""`RayFleetClient`: the replicas of a fleet as actors. New ones get their weights out of Ray's
object store.
"""

import asyncio
import itertools
from typing import NoReturn

from nano_inference.config import EngineConfig
from nano_inference.errors import WeightUpdateError
from nano_inference.fleet import FleetClient
from nano_inference.remote import EngineClient, EngineRestarting
from nano_inference.types import KvPolicy
from nano_ray.client import BUCKET_SECONDS, RayClient
from nano_ray.cluster import RankNeeds
from nano_ray.kept import Bucket, KeptWeights


class RayFleetClient(FleetClient):
    """As `FleetClient`.

    Args:
        config: of every engine.
        needs: what each rank takes of its node.
        replicas: how many there are in the beginning.
        max_backlog: see `EngineClient`.
        restart: start a new engine in the place of one that has died.
        patience: seconds in which a replica must have a place, and then be ready.
        stall_timeout, prefill_replicas, share_prefixes: see `FleetClient`.

    Attributes:
        kept: the updates that came through the object store, as far as they still serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        needs: RankNeeds,
        replicas: int,
        max_backlog: int,
        *,
        restart: bool = True,
        patience: float = 300.0,
        stall_timeout: float = 60.0,
        prefill_replicas: int = 0,
        share_prefixes: bool = False,
    ) -> None:
        super().__init__(
            self._client,
            replicas,
            max_backlog,
            restart=restart,
            stall_timeout=stall_timeout,
            seed=config.seed,
            prefill_replicas=prefill_replicas,
            share_prefixes=share_prefixes,
        )
        self.kept = KeptWeights()
        self._config, self._needs, self._patience = config, needs, patience
        self._sessions = itertools.count(1)
        self._updating = asyncio.Lock()  # held from an update's first bucket to its end

    def nodes(self) -> dict[str, str]:
        """Ray's ids of the nodes, by replica."""
        return {
            name: client.node
            for name, client in self.supervisor.living().items()
            if isinstance(client, RayClient)
        }

    async def begin_update(self, complete: bool, check_finite: bool) -> "RayUpdate":
        """Open an update of all replicas; waits for the one before. Raises `WeightUpdateError`."""
        await self._updating.acquire()
        try:
            session = next(self._sessions)
            options = {"complete": complete, "check_finite": check_finite}
            newest = await self.call("begin_update", session=session, **options)
        except BaseException as problem:
            self._updating.release()
            _raise_refusal(problem)
        return RayUpdate(self, session, max(newest, self.kept.version), self._updating)

    # -- inside ------------------------------------------------------------------------------------

    def _client(self, number: int) -> EngineClient:
        return RayClient(
            self._config,
            self._needs,
            self._max_backlog,
            name=f"replica {number}",
            patience=self._patience,
            welcome=self._welcome,
        )

    async def _welcome(self, client: RayClient) -> None:
        await client.take_updates(self.kept.updates)

    async def bring_weights(self, donor: EngineClient, client: EngineClient, version: int) -> None:
        """What the store keeps of them, else what the donor puts there."""
        assert isinstance(donor, RayClient)
        assert isinstance(client, RayClient)
        if self.kept.version == version:
            has = await client.call("get_weight_version")
            await client.take_updates(self.kept.since(has))
        else:
            await client.take_updates([await donor.give_update(version)])


class RayUpdate:
    """An update under way. Every method raises `WeightUpdateError` with the old version serving
    everywhere, and then it is over.
    """

    def __init__(
        self, fleet: RayFleetClient, session: int, newest: int, lock: asyncio.Lock
    ) -> None:
        self._fleet, self._session, self._newest, self._lock = fleet, session, newest, lock
        self._buckets: list[Bucket] = []

    async def add(self, bucket: Bucket) -> None:
        """Let all replicas take a bucket; returns when they have."""
        try:
            await self._fleet.call(
                "receive_bucket", session=self._session, bucket=bucket, timeout=BUCKET_SECONDS
            )
        except BaseException as problem:
            await self.cancel(str(problem))
            _raise_refusal(problem)
        self._buckets.append(bucket)

    async def finish(self, version: int | None, kv_policy: KvPolicy, seconds: float) -> int:
        """Let it serve on all replicas; returns its version."""
        number = self._newest + 1 if version is None else version
        options = {"version": number, "kv_policy": kv_policy}
        try:
            await self._fleet.call(
                "finish_update", session=self._session, timeout=seconds, **options
            )
        except BaseException as problem:
            await self.cancel(str(problem))
            _raise_refusal(problem)
        self._fleet.kept = self._fleet.kept.after(number, self._buckets)
        self._session = 0
        self._lock.release()
        return number

    async def cancel(self, reason: str) -> None:
        """Forget it. Does nothing once it is over."""
        session, self._session = self._session, 0
        if session:
            try:
                await self._fleet.call("cancel_update", session=session, reason=reason)
            except Exception:  # no caller is left who would know of it
                pass
            finally:
                self._lock.release()


def _raise_refusal(problem: BaseException) -> NoReturn:
    """Raise the error for the caller, after `problem`."""
    if isinstance(problem, EngineRestarting):
        raise WeightUpdateError(f"no replica serves: {problem}") from problem
    raise problem

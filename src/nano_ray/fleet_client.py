"""`RayFleetClient`: the replicas of a fleet as actors. New replicas get their weights from Ray's
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
    """A `FleetClient` whose replicas are Ray actors.

    Args:
        config: Configuration of every engine.
        needs: Resources of each rank.
        replicas: Initial number of replicas.
        max_backlog: Backlog of a stream, as in `EngineClient`.
        restart: Start a new engine for each one that has died.
        patience: Seconds until a replica must be placed, and then again until it is ready.
        stall_timeout, prefill_replicas, share_prefixes: Options of `FleetClient`.

    Attributes:
        kept: Updates sent through the object store, without buckets that were replaced since.
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
        """Return Ray's ids of the nodes, by replica."""
        return {
            name: client.node
            for name, client in self.supervisor.living().items()
            if isinstance(client, RayClient)
        }

    async def begin_update(self, complete: bool, check_finite: bool) -> "RayUpdate":
        """Open an update of all replicas after any earlier one ends. Raises `WeightUpdateError`."""
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
        """Sync a replica from the kept updates, or from the donor if they do not make `version`."""
        assert isinstance(donor, RayClient)
        assert isinstance(client, RayClient)
        if self.kept.version == version:
            has = await client.call("get_weight_version")
            await client.take_updates(self.kept.since(has))
        else:
            await client.take_updates([await donor.give_update(version)])


class RayUpdate:
    """An open update. If a method raises `WeightUpdateError`, the update has ended, and the old
    version is live everywhere.
    """

    def __init__(
        self, fleet: RayFleetClient, session: int, newest: int, lock: asyncio.Lock
    ) -> None:
        self._fleet, self._session, self._newest, self._lock = fleet, session, newest, lock
        self._buckets: list[Bucket] = []

    async def add(self, bucket: Bucket) -> None:
        """Send a bucket to all replicas and wait until they have received it."""
        try:
            await self._fleet.call(
                "receive_bucket", session=self._session, bucket=bucket, timeout=BUCKET_SECONDS
            )
        except BaseException as problem:
            await self.cancel(str(problem))
            _raise_refusal(problem)
        self._buckets.append(bucket)

    async def finish(self, version: int | None, kv_policy: KvPolicy, seconds: float) -> int:
        """Make the update live on all replicas and return its version."""
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
        """Cancel the update. Has no effect after its end."""
        session, self._session = self._session, 0
        if session:
            try:
                await self._fleet.call("cancel_update", session=session, reason=reason)
            except Exception:  # the caller already gets the first error
                pass
            finally:
                self._lock.release()


def _raise_refusal(problem: BaseException) -> NoReturn:
    """Raise `problem`, or the error that the caller gets instead."""
    if isinstance(problem, EngineRestarting):
        raise WeightUpdateError(f"no replica is serving: {problem}") from problem
    raise problem

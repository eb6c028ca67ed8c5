"""`EngineWeights`: the engine process's side of weight updates. It holds the state that outlives a
call: process groups with trainers, by name, and the open update.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_inference.arrays import Tensor, as_host, dtype_name
from nano_inference.engine.engine import InferenceEngine
from nano_inference.engine.weight_updates import require_policy
from nano_inference.errors import WeightUpdateConflict, WeightUpdateError
from nano_inference.parallel.shared_tensors import Offer
from nano_inference.remote import time_limits
from nano_inference.remote.operations import Received
from nano_inference.types import KvPolicy
from nano_inference.weights.transports import Deadline, WeightTransport, wire
from nano_inference.weights.transports.addresses import Address, check_host
from nano_inference.weights.transports.files import WeightFiles, write_folder
from nano_inference.weights.transports.interface import Shapes, receive_into
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.safetensors_bytes import SafetensorsBytes
from nano_inference.weights.update import WeightUpdate

if TYPE_CHECKING:  # needs torch
    from nano_inference.weights.transports.trainer_broadcasts import TrainerGroup

log = logging.getLogger("nano_inference.server")

MOST_NUMBERS = 2**20  # limit of one `weight_rows` call


class _Membership:
    """Membership in a process group, joined or being joined."""

    def __init__(self, address: Address | None, deadline: Deadline) -> None:
        self.joined: TrainerGroup | None = None
        self.deadline = deadline  # for joining
        self._address = address

    def is_held(self) -> bool:
        """Return True if the group has a live trainer. While the group is still forming, probe the
        trainer's store instead, since the caller may have left.
        """
        if self.joined is not None:
            return self.joined.trainer_lives()
        if self._address is None:  # no store to probe
            return bool(self.deadline.left())
        try:
            socket.create_connection(self._address, timeout=time_limits.STORE_PROBE).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leave the group, or stop waiting for it."""
        self.deadline.end()
        if self.joined is not None:
            self.joined.close()


class _Session:
    """An update between its first and last call."""

    def __init__(self, number: int, update: WeightUpdate) -> None:
        self.number, self.update = number, update
        self.names: set[str] = set()  # tensors received or being received
        self.file: SafetensorsBytes | None = None  # file being received in parts
        self.busy = threading.Lock()  # held by the receiving call


class EngineWeights:
    """Weight updates of one engine. Each call runs on its own thread and may block until its
    deadline.

    A failed update is closed and the old version keeps serving. A failure around a broadcast, such
    as a call at the wrong time, also closes the process group: the trainer may have sent tensors
    that no call received.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._manager = engine.weight_sync
        self._memory = ReusedMemory()
        self._lock = threading.Lock()  # guards the groups and the session
        self._groups: dict[str, _Membership] = {}
        self._session: _Session | None = None

    # -- groups ------------------------------------------------------------------------------------

    def join_group(
        self,
        group: str,
        named: bool,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        seconds: float,
        backend: str | None = None,
        pynccl: bool = False,
        unique_id: bytes | None = None,
    ) -> None:
        """Join a process group (`Control.groups.join`)."""
        device = self._engine.model.device
        if unique_id is None:
            check_host(host)
        elif device.type != "cuda":
            raise WeightUpdateError(
                f"the model is on {device.type!r}, and an id of NCCL is for cards; make a group of "
                "torch.distributed with gloo."
            )
        deadline = Deadline(seconds)
        address = (host, port) if unique_id is None else None
        member = self._reserve(group, _Membership(address, deadline))
        lost = WeightUpdateConflict(f"the group {group!r} was left while it was being joined.")
        try:
            if unique_id is not None or (pynccl and device.type == "cuda"):
                from nano_inference.weights.transports.pynccl import join_pynccl

                member.joined = join_pynccl(
                    address, rank, world_size, deadline, device, unique_id=unique_id
                )
            else:
                from nano_inference.weights.transports.trainer_broadcasts import join_trainer

                backend = backend or ("nccl" if device.type == "cuda" else "gloo")
                member.joined = join_trainer(
                    (host, port),
                    rank,
                    world_size,
                    deadline,
                    backend=backend,
                    device=device if backend == "nccl" else None,
                    name=group if named else None,
                )
        except BaseException:
            if self._leave(group, member):
                raise
            raise lost from None
        if self._groups.get(group) is not member:
            member.joined.close()
            raise lost

    def leave_group(self, group: str) -> bool:
        """Leave a group. Return False if there is none with this name."""
        member = self._groups.get(group)
        return member is not None and self._leave(group, member)

    def has_group(self, group: str) -> bool:
        """Return True if the group is joined and its trainer lives."""
        member = self._groups.get(group)
        return member is not None and member.joined is not None and member.joined.trainer_lives()

    def close(self) -> None:
        """Leave all groups, including those being joined. Called when the engine ends."""
        for group, member in list(self._groups.items()):
            self._leave(group, member)

    def _reserve(self, group: str, member: _Membership) -> _Membership:
        """Reserve a group's name for a new member. Raises if a live trainer has it. Withdraws an
        update that a dead trainer left open.
        """
        with self._lock:
            old, session = self._groups.get(group), self._session
            if old is not None and old.is_held():
                raise WeightUpdateConflict(
                    f"group {group!r} exists and its trainer is alive; leave it first."
                )
            if session is not None and not session.update.done():
                if any(each.is_held() for each in self._groups.values()):
                    raise WeightUpdateConflict(
                        "a weight update is open; finish it before you join a group."
                    )
                lost = WeightUpdateConflict(
                    "the trainer of this weight update died, and another trainer has joined."
                )
                self._manager.withdraw(session.update, lost)
            self._groups[group] = member
        if old is not None:
            old.close()
        return member

    def _leave(self, group: str, member: _Membership) -> bool:
        """Leave a group, unless a newer member has its name by now."""
        with self._lock:
            if self._groups.get(group) is not member:
                return False
            del self._groups[group]
        member.close()
        return True

    # -- a session ---------------------------------------------------------------------------------

    def begin_update(
        self,
        session: int,
        known: int | None = None,
        complete: bool = False,
        check_finite: bool = False,
    ) -> int:
        """Open an update and return the newest weight version.

        Args:
            session: The caller's number of the update. All later calls name it.
            known: The session that the caller believes is open. Any other open session belongs to
                abandoned calls and is closed.
            complete: Reject an update that lacks a tensor.
            check_finite: Reject NaN and infinite values.
        """
        self._require_awake()
        with self._lock:
            old = self._session
            if old is not None and not old.update.done():
                if old.number == known:
                    raise WeightUpdateConflict(
                        "a weight update is already open; finish or cancel it first."
                    )
                self._manager.withdraw(
                    old.update, WeightUpdateConflict("another weight update has begun.")
                )
            update = self._manager.begin(complete=complete, check_finite=check_finite)
            self._session = _Session(session, update)
            return self._manager.newest

    def receive_broadcast(
        self,
        session: int,
        group: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        seconds: float,
        packed_bytes: int | None = None,
    ) -> Received:
        """Receive broadcast tensors (`Control.updates.receive_broadcast`), each given as (name,
        dtype, shape).
        """
        with self._group(group) as joined:
            from nano_inference.weights.transports.trainer_broadcasts import TrainerBroadcasts

            def transport(current: _Session) -> WeightTransport:
                infos = wire.described(tensors, self._manager.shapes, current.names)
                if not infos:
                    raise WeightUpdateError("nothing to receive: the list of tensors is empty.")
                return TrainerBroadcasts(
                    joined, infos, packed_bytes=packed_bytes, memory=self._memory
                )

            return self._receive(session, transport, seconds)

    def receive_stream(self, session: int, group: str, seconds: float) -> Received:
        """Receive a stream of tensors (`Control.updates.receive_stream`)."""
        with self._group(group) as joined:
            from nano_inference.weights.transports.trainer_streams import stream_of

            return self._receive(session, lambda _: stream_of(joined, self._memory), seconds)

    def receive_file(
        self,
        session: int,
        size: int,
        content: memoryview,
        seconds: float,
    ) -> Received:
        """Take in the next part of a safetensors file of `size` bytes."""
        with self._step(session) as current:
            if current.file is None:
                current.file = SafetensorsBytes(
                    size, self._manager.shapes, current.names, self._memory
                )
            current.file.add(content)
            whole, current.file = current.file, None if current.file.is_whole else current.file
            if whole.is_whole:
                receive_into(self._manager, whole, current.update, Deadline(seconds))
            return self._received(None)

    def receive_bucket(self, session: int, read: Callable[[Shapes], Mapping[str, Tensor]]) -> None:
        """Take in a bucket from this machine.

        Args:
            session: The open update.
            read: Checks the bucket against names and shapes, raises `WeightUpdateError`, and
                returns tensors that the update may keep.
        """
        with self._step(session) as current:
            self._manager.receive(read(self._manager.shapes), copy=False, of=current.update)

    def receive_lent(self, session: int, offers: Sequence[Offer]) -> Received:
        """Copy tensors from memory that a trainer on the same card lends
        (`Control.updates.receive_lent`).
        """
        from nano_inference.parallel.card_memory import card_of
        from nano_inference.weights.transports.lent import borrowed

        with self._step(session) as current:
            card = card_of(self._engine.model.device)
            with borrowed(offers, card, self._manager.shapes, current.names) as tensors:
                self._manager.receive(tensors, copy=True, of=current.update)
            return self._received(None)

    def receive_folder(self, session: int, path: str, seconds: float) -> Received:
        """Receive a folder of weights (`Control.updates.receive_folder`)."""
        return self._receive(session, lambda _: WeightFiles(Path(path)), seconds)

    def prepare_update(
        self, session: int, version: int, kv_policy: KvPolicy, seconds: float
    ) -> None:
        """Run all checks of `finish_update`, and wait until it would apply immediately.

        This lets several engines switch to the new version at the same time. An error closes the
        session.
        """
        deadline = Deadline(seconds)
        with self._step(session) as current:
            require_policy(self._engine.shared.loop, kv_policy)
            self._manager.check(version=version, of=current.update)
            while kv_policy == "finish_old" and self._would_wait(kv_policy):
                deadline.check(
                    f"requests on old weights did not finish; weight version {version} "
                    "waits for them"
                )
                time.sleep(time_limits.UPDATE_LOOK)

    def finish_update(self, session: int, version: int, kv_policy: KvPolicy, seconds: float) -> int:
        """Apply the update. Return its version once it serves."""
        deadline = Deadline(seconds)
        with self._step(session) as current:
            require_policy(self._engine.shared.loop, kv_policy)
            self._require_possible(kv_policy)
            current.update.kv_policy = kv_policy
            self._manager.end(version=version, of=current.update)
            while not current.update.wait(deadline.at_most(time_limits.UPDATE_LOOK)):
                try:
                    self._require_awake()
                    deadline.check(f"weight version {version} was not applied")
                except WeightUpdateError as problem:
                    # False: the update was applied just in time
                    if self._manager.withdraw(current.update, problem):
                        raise
            return current.update.result(0)

    def cancel_update(self, session: int, reason: str) -> bool:
        """Close the session, even while another call is receiving. Return True if an open update
        was discarded.
        """
        with self._lock:
            current = self._session
        if current is None or current.number != session:
            return False
        return self._manager.withdraw(current.update, WeightUpdateConflict(reason))

    # -- checks ------------------------------------------------------------------------------------

    def save_weights(self, path: str, version: int) -> int:
        """Write all served weights to a new folder for `receive_folder`, and return their version.

        This copies the weights to a replica that joins. They must not change meanwhile.
        """
        self._require_awake()
        with self._manager.lock:
            if self._manager.version != version:
                raise WeightUpdateConflict(
                    f"expected weight version {version}, but {self._manager.version} is serving."
                )
            write_folder(path, self._manager.weights.state_dict(), version=version)
        return version

    def weight_rows(self, tensor: str, count: int) -> list[Any]:
        """Return the first rows of a tensor (`Control.checksums.rows`)."""
        self._require_awake()
        with self._manager.lock:
            rows = self._manager.weights.tensor(tensor)[:count]
        if rows.numel() > MOST_NUMBERS:
            fewer = max(1, count * MOST_NUMBERS // rows.numel())
            raise WeightUpdateError(
                f"{len(rows)} rows of {tensor!r} hold {rows.numel()} numbers; request {fewer} rows."
            )
        return as_host(rows).float().tolist()

    def describe(self) -> dict[str, Any]:
        """Return the engine's properties by name."""
        engine = self._engine
        most = max(engine.config.max_loras, len(engine.config.loras))
        return {
            "max_loras": most,
            "max_lora_rank": engine.config.max_lora_rank if most else 0,
            "device": str(engine.model.device),
            "dtype": dtype_name(engine.model.dtype),
            "architecture": engine.spec.architecture,
            "block_size": engine.config.block_size,
            "cache_type": engine.config.cache_type,
            "max_batch_size": engine.config.max_batch_size,
            "max_model_len": engine.max_model_len,
            "vocab_size": engine.spec.vocab_size,
            "kv_cache_tokens": engine.memory_budget.num_tokens,
            "num_tensors": self._manager.num_tensors,
            "numerics": engine.numerics.fingerprint,
        }

    # -- inside ------------------------------------------------------------------------------------

    def _require(self, session: int) -> _Session:
        with self._lock:
            current = self._session
        if current is None or current.number != session:
            raise WeightUpdateConflict("no weight update is open; begin one first.")
        if current.update.done():
            raise current.update.error or WeightUpdateConflict(
                "this weight update is finished; begin a new one."
            )
        return current

    @contextmanager
    def _group(self, group: str) -> Iterator["TrainerGroup"]:
        """Yield a group to receive in. Leave it on any error, also for a call at the wrong time:
        the trainer may have sent tensors that the next call would take for its own.
        """
        member = self._groups.get(group)
        if member is None or member.joined is None:
            raise WeightUpdateConflict(f"group {group!r} does not exist; join it first.")
        try:
            yield member.joined
        except BaseException:
            self._leave(group, member)
            raise

    def _receive(
        self, session: int, transport: Callable[[_Session], WeightTransport], seconds: float
    ) -> Received:
        deadline = Deadline(seconds)
        with self._step(session) as current:
            return self._received(
                receive_into(self._manager, transport(current), current.update, deadline)
            )

    def _received(self, version: int | None) -> Received:
        return Received(version, self._engine.shared.life.paused_by is not None)

    @contextmanager
    def _step(self, session: int) -> Iterator[_Session]:
        """Run one call of a session exclusively. An error closes the session."""
        current = self._require(session)
        if not current.busy.acquire(blocking=False):
            raise WeightUpdateConflict(
                "another call of this weight update is running; wait for its answer."
            )
        try:
            self._require_awake()
            yield current
        except Exception as problem:
            error = problem
            if not isinstance(error, WeightUpdateError):
                log.exception("cannot receive weights")
                error = WeightUpdateError("cannot receive the weights; see the engine's log.")
            self._manager.withdraw(current.update, error)
            if error is problem:
                raise
            raise error from problem
        finally:
            current.busy.release()

    def _require_awake(self) -> None:
        if not self._engine.shared.life.has_weights:
            raise WeightUpdateConflict("the weights are asleep; wake them first.")

    def _would_wait(self, kv_policy: KvPolicy) -> bool:
        shared = self._engine.shared
        with shared.lock:
            return shared.loop.would_wait(kv_policy)

    def _require_possible(self, kv_policy: KvPolicy) -> None:
        """Raise if the update would deadlock: it would wait for paused requests, and the trainer
        resumes only after the update.
        """
        shared = self._engine.shared
        with shared.lock:
            if not shared.life.launching and shared.loop.would_wait(kv_policy):
                raise WeightUpdateConflict(
                    f"an update with kv_policy={kv_policy!r} would wait for paused requests; "
                    "resume first."
                )

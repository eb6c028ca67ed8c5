"""`Router`: which replica takes the next request. Pure: no clock, no asyncio, no engine; it only
counts.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nano_inference.errors import NanoInferenceError

WAITING = 4  # a sample that waits weighs as much as so many that run
# of a piece, every so many tokens are in its key: others hardly ever tell prompts apart that these
# do not
STRIDE = 4
KEYS = 4096  # prefixes that are remembered for every replica
_STAMP_BITS = 32  # of an order: the score, and below it when the replica was last chosen
_STAMPS = (1 << _STAMP_BITS) - 1
_NEVER = np.iinfo(np.int64).max
_FEW = 6  # holders of a prefix that are looked at one by one


class NoReplica(NanoInferenceError):
    """There is no replica that takes requests."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place. `Router.started` and `Router.finished` take it.

    Attributes:
        replica: its name.
        waiting: samples of the request that have not begun.
        running: samples that have begun and not ended.
        cached: prompt tokens whose keys and values that replica probably has.
        life: tells a replica from a later one of the same name.
    """

    replica: str
    waiting: int
    running: int = 0
    cached: int = 0
    life: int = 0


class Router:
    """Places requests on replicas, by load and by what they have in their prefix caches.

    A replica's *score* is `waiting * 4 + running`, in samples; the router counts them itself, from
    `place`, `started` and `finished`. A request goes to the replica with the lowest **cost**: its
    score, less one for every `piece` tokens of the prompt's prefix that it holds (`piece_worth`
    says how much). So the holder of the longest prefix is preferred until it is overloaded: until
    its queue costs more than the prefix saves. Of equals the one that was chosen longest ago is
    taken. A request is one placement, whatever the number of its samples: groups stay together.

    **Prefixes** are known coarsely: chained keys at fixed places of the prompt (after 1, 2, 3, 4,
    6, 8, 12, 16, 24 … pieces of `piece` tokens; of what lies between two places the last piece is
    looked at), with the salt and the weight version at their root. A key names the replicas that
    were sent such a prompt, as the bits of an integer. There are at most `max_keys`, and the ones
    least recently used go. A wrong guess costs a prefill and no bit, so nobody tells the router
    what replicas evict; an update changes the version and so the keys.

    **Sessions**: requests with the same session go where the last one went, as long as that replica
    takes requests. `max_sessions` are remembered, the ones least recently used go.

    A *draining* replica takes nothing new and keeps what it has. Nothing here waits or reads a
    clock: at 1,000 replicas a placement takes some tens of microseconds.

    Args:
        piece: tokens that a key looks at.
        most_keys: of one prompt.
        piece_worth: score that a cached piece is worth.
        max_keys: prefixes that are remembered, some 300 bytes each at a thousand replicas; None:
            `KEYS` for every replica.
        max_sessions: sessions that are remembered.
    """

    def __init__(
        self,
        *,
        piece: int = 128,
        most_keys: int = 24,
        piece_worth: int = 1,
        max_keys: int | None = None,
        max_sessions: int = 1 << 16,
    ) -> None:
        self._piece, self._worth = piece, piece_worth
        self._ends = [piece * count for count in _half_octaves(most_keys)]
        self._max_keys, self._max_sessions = max_keys, max_sessions
        self._holders: OrderedDict[int, int] = OrderedDict()  # key -> replicas, a bit each
        self._sessions: OrderedDict[Hashable, str] = OrderedDict()
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []  # by slot
        self._lives: list[int] = []  # which replica has the slot, by how many came before
        self._num_added = 0
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._draining: set[str] = set()
        # score and stamp; _NEVER: takes nothing
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._open = 0  # replicas that take requests, a bit each
        self._stamp = 0

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names, in the order in which they came."""
        return tuple(self._slots)

    def add(self, replica: str) -> None:
        """A replica takes requests from now on. Raises `ValueError` for a name that is there."""
        if replica in self._slots:
            raise ValueError(f"there is a replica {replica!r} already.")
        if None in self._names:
            slot = self._names.index(None)
            self._names[slot] = replica
        else:
            slot = len(self._names)
            self._names.append(replica)
            self._lives.append(0)
            self._waiting.append(0)
            self._running.append(0)
            self._order = np.append(self._order, np.int64(_NEVER))
        self._slots[replica] = slot
        self._num_added += 1
        self._lives[slot] = self._num_added
        self._waiting[slot] = self._running[slot] = 0
        self._reopen(replica)

    def remove(self, replica: str) -> None:
        """It is gone; tickets of it count no more. Raises `KeyError` for one that is not there."""
        slot = self._slots[replica]
        self.forget(replica)  # the slot may be another one's soon
        self._close(replica)
        del self._slots[replica]
        self._draining.discard(replica)
        self._names[slot] = None

    def drain(self, replica: str, draining: bool = True) -> None:
        """It takes nothing new; with `draining=False` it does again. Raises `KeyError`."""
        _ = self._slots[replica]
        if draining:
            self._draining.add(replica)
            self._close(replica)
        else:
            self._draining.discard(replica)
            self._reopen(replica)

    def is_draining(self, replica: str) -> bool:
        """Whether it takes nothing new. Raises `KeyError`."""
        _ = self._slots[replica]
        return replica in self._draining

    def forget(self, replica: str | None = None) -> None:
        """What this replica (None: any) had in its prefix cache is gone."""
        if replica is None:
            self._holders.clear()
            return
        rest = ~(1 << self._slots[replica])
        self._holders = OrderedDict(
            (key, mask & rest) for key, mask in self._holders.items() if mask & rest
        )

    def waiting(self, replica: str) -> int:
        """Samples there that have not begun."""
        return self._waiting[self._slots[replica]]

    def running(self, replica: str) -> int:
        """Samples there that have begun and not ended."""
        return self._running[self._slots[replica]]

    def score(self, replica: str) -> int:
        """Its load; the lower the better."""
        slot = self._slots[replica]
        return self._waiting[slot] * WAITING + self._running[slot]

    # -- requests ----------------------------------------------------------------------------------

    def place(
        self,
        prompt: Sequence[int],
        num_samples: int = 1,
        *,
        session: Hashable | None = None,
        salt: str | None = None,
        version: int = 0,
        without: Collection[str] = (),
    ) -> Ticket:
        """Choose a replica for a request, and count it there.

        Args:
            prompt: token ids; not kept.
            num_samples: of the request.
            session: requests of the same one go to the same replica.
            salt: prefixes are shared only between requests of the same salt.
            version: of the weights that will compute it.
            without: replicas that are not to get it.

        Raises `NoReplica`.
        """
        open_ = self._open
        for name in without:
            if name in self._slots:
                open_ &= ~(1 << self._slots[name])
        if not open_:
            raise NoReplica("no replica takes requests.")
        keys = self._keys(prompt, salt, version)
        slot, cached = self._of_session(session, open_), 0
        found = self._found(keys, open_)
        if slot is None:
            slot, cached = self._cheapest(found, open_)
        else:
            cached = max((end for end, mask in found if mask >> slot & 1), default=0)
        self._remember(keys, 1 << slot)
        replica = self._names[slot]
        assert replica is not None
        if session is not None:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        self._stamp += 1
        self._count(slot, num_samples, 0)
        return Ticket(replica, num_samples, cached=cached, life=self._lives[slot])

    def place_at(self, replica: str, num_samples: int = 1) -> Ticket:
        """Count a request at this replica, draining or not. Raises `KeyError`."""
        slot = self._slots[replica]
        self._stamp += 1
        self._count(slot, num_samples, 0)
        return Ticket(replica, num_samples, life=self._lives[slot])

    def started(self, ticket: Ticket, num_samples: int | None = None) -> None:
        """So many samples of a request (None: all) wait no more."""
        began = ticket.waiting if num_samples is None else min(num_samples, ticket.waiting)
        ticket.waiting -= began
        ticket.running += began
        if began and (slot := self._slot_of(ticket)) is not None:
            self._count(slot, -began, began)

    def finished(self, ticket: Ticket, num_samples: int | None = None) -> None:
        """So many samples of a request (None: all) have ended, or left."""
        left = ticket.running + ticket.waiting
        ended = left if num_samples is None else min(num_samples, left)
        ran = min(ended, ticket.running)
        ticket.running -= ran
        ticket.waiting -= ended - ran
        if ended and (slot := self._slot_of(ticket)) is not None:
            self._count(slot, ran - ended, -ran)

    # -- inside ------------------------------------------------------------------------------------

    def _slot_of(self, ticket: Ticket) -> int | None:
        slot = self._slots.get(ticket.replica)
        return slot if slot is not None and self._lives[slot] == ticket.life else None

    def _count(self, slot: int, waiting: int, running: int) -> None:
        self._waiting[slot] += waiting
        self._running[slot] += running
        if self._open >> slot & 1:
            score = self._waiting[slot] * WAITING + self._running[slot]
            stamp = self._stamp if waiting > 0 else int(self._order[slot])
            self._order[slot] = score << _STAMP_BITS | stamp & _STAMPS

    def _close(self, replica: str) -> None:
        slot = self._slots[replica]
        self._open &= ~(1 << slot)
        self._order[slot] = _NEVER

    def _reopen(self, replica: str) -> None:
        slot = self._slots[replica]
        self._open |= 1 << slot
        self._order[slot] = self.score(replica) << _STAMP_BITS

    def _of_session(self, session: Hashable | None, open_: int) -> int | None:
        replica = None if session is None else self._sessions.get(session)
        slot = None if replica is None else self._slots.get(replica)
        return slot if slot is not None and open_ >> slot & 1 else None

    def _keys(self, prompt: Sequence[int], salt: str | None, version: int) -> list[tuple[int, int]]:
        """(key, tokens that it stands for), from the first piece on."""
        piece, keys = self._piece, list[tuple[int, int]]()
        key, length = hash((salt, version)), len(prompt)
        for end in self._ends:
            if end > length:
                break
            key = hash((key, tuple(prompt[end - piece : end : STRIDE])))
            keys.append((key, end))
        return keys

    def _found(self, keys: list[tuple[int, int]], open_: int) -> list[tuple[int, int]]:
        """(tokens, who holds them), from short to long: the longest for each set of holders."""
        found = list[tuple[int, int]]()
        mask, holders = open_, self._holders
        for key, end in keys:
            mask &= holders.get(key, 0)
            if not mask:
                break
            if found and found[-1][1] == mask:
                found[-1] = (end, mask)
            else:
                found.append((end, mask))
        return found

    def _cheapest(self, found: list[tuple[int, int]], open_: int) -> tuple[int, int]:
        """The slot of the lowest cost, and how much of the prompt it holds."""
        best = int(self._order.argmin()) if open_ == self._open else self._first(open_)
        least = cost = int(self._order[best]) >> _STAMP_BITS
        cached = 0
        for end, mask in reversed(found):
            worth = end // self._piece * self._worth
            if least - worth >= cost and cached:  # a shorter prefix cannot be cheaper
                break
            slot = self._first(mask)
            its = (int(self._order[slot]) >> _STAMP_BITS) - worth
            if its < cost or (its == cost and not cached):
                best, cost, cached = slot, its, end
        return best, cached

    def _first(self, mask: int) -> int:
        """The slot of the lowest order among these."""
        if not mask & (mask - 1):
            return mask.bit_length() - 1
        order = self._order
        if mask.bit_count() <= _FEW:
            slots = list[int]()
            while mask:
                slots.append((mask & -mask).bit_length() - 1)
                mask &= mask - 1
            return min(slots, key=lambda slot: int(order[slot]))
        size = len(order)
        bits = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), np.uint8)
        among = np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little"))
        return int(among[order[among].argmin()])

    def _remember(self, keys: list[tuple[int, int]], bit: int) -> None:
        holders = self._holders
        for key, _ in reversed(keys):  # the first ones, which most prompts share, go last
            holders[key] = holders.get(key, 0) | bit
            holders.move_to_end(key)
        most = self._max_keys if self._max_keys is not None else KEYS * len(self._names)
        while len(holders) > most:
            holders.popitem(last=False)


def _half_octaves(count: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 …, so many."""
    return [1, *((2 + at % 2) << at // 2 for at in range(count - 1))]

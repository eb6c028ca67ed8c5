"""`Router`: chooses a replica for each request. Pure: no clock, no asyncio, no engine."""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from nano_inference.fleet.errors import NoReplica

WAITING = 4  # weight of a waiting sample, in running samples
# A key hashes every fourth token of a piece, since prompts rarely differ only in the others.
STRIDE = 4
KEYS = 4096  # remembered prefixes per replica


@dataclass(slots=True, eq=False)
class _Load:
    """Samples of one replica, and its place in the router's order."""

    replica: str
    waiting: int = 0
    running: int = 0
    order: tuple[int, int] = (0, 0)  # its score, and when it was last chosen

    @property
    def score(self) -> int:
        return self.waiting * WAITING + self.running

    def count(self, waiting: int, running: int, chosen: int | None = None) -> None:
        """Add samples. `chosen` is the number of the placement that adds them, if one does."""
        self.waiting += waiting
        self.running += running
        self.order = self.score, self.order[1] if chosen is None else chosen


@dataclass(slots=True, eq=False)
class Ticket:
    """Placement of a request. Pass it to `Router.started` and `Router.finished`.

    Attributes:
        replica: Name of the replica.
        waiting: Samples of the request that have not begun.
        running: Samples that have begun and not ended.
        cached: Prompt tokens whose keys and values the replica probably has.
    """

    replica: str
    waiting: int
    running: int = 0
    cached: int = 0
    _load: _Load = field(default_factory=lambda: _Load(""), repr=False)


class Router:
    """Placement of requests on replicas, by load and by the contents of their prefix caches.

    A replica's *score* is `waiting * 4 + running`, in samples. The router counts them itself, from
    `place`, `started` and `finished`. A request gets the replica with the lowest **cost**: the
    score, less `piece_worth` for every `piece` tokens of the prompt's prefix that the replica
    holds. So the holder of the longest prefix is preferred until its queue costs more than the
    prefix saves. Among equals the replica chosen longest ago wins. A request is one placement,
    whatever the number of its samples, so groups stay together.

    **Prefixes** are known coarsely, by chained keys at fixed positions of the prompt: after 1, 2,
    3, 4, 6, 8, 12, 16, 24 … pieces of `piece` tokens. Between two positions only the last piece of
    tokens is hashed. The salt, the weight version and the adapter are the root of the chain. A
    key names the replicas that got such a prompt. At most `max_keys` are kept, and the least
    recently used are dropped first. A wrong guess costs a prefill and changes no result, so
    replicas need not report evictions. An update changes the version, and so all keys.

    **Sessions**: a request gets the replica of its session's last request, as long as that replica
    accepts requests. At most `max_sessions` are kept, and the least recently used are dropped
    first.

    A *draining* replica gets no new requests and keeps its own.

    Args:
        piece: Number of tokens that a key hashes.
        most_keys: Maximum number of keys of one prompt.
        piece_worth: Score that one cached piece is worth.
        max_keys: Maximum number of prefixes, some 400 bytes each. None: `KEYS` per replica.
        max_sessions: Maximum number of sessions.
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
        self._holders: OrderedDict[int, set[_Load]] = OrderedDict()  # by key
        self._sessions: OrderedDict[Hashable, str] = OrderedDict()
        self._loads: dict[str, _Load] = {}
        self._open: dict[str, _Load] = {}  # replicas that accept requests
        self._num_placed = 0

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas, in the order in which they were added."""
        return tuple(self._loads)

    def add(self, replica: str) -> None:
        """Add a replica that accepts requests. Raises `ValueError` if the name is taken."""
        if replica in self._loads:
            raise ValueError(f"replica {replica!r} exists already; choose another name.")
        self._loads[replica] = self._open[replica] = _Load(replica)

    def remove(self, replica: str) -> None:
        """Remove a replica, whose tickets no longer count. Raises `KeyError` if it is unknown."""
        self.forget(replica)
        del self._loads[replica]
        self._open.pop(replica, None)

    def drain(self, replica: str, draining: bool = True) -> None:
        """Send a replica no new requests, or some again if not `draining`. Raises `KeyError`."""
        load = self._loads[replica]
        if draining:
            self._open.pop(replica, None)
        else:
            self._open[replica] = load

    def is_draining(self, replica: str) -> bool:
        """Return True if a replica accepts no new requests. Raises `KeyError`."""
        return self._loads[replica].replica not in self._open

    def forget(self, replica: str | None = None) -> None:
        """Record that the prefix cache of a replica (None: of every replica) is empty."""
        if replica is None:
            self._holders.clear()
            return
        gone = self._loads[replica]
        for key in [key for key, holders in self._holders.items() if gone in holders]:
            self._holders[key].discard(gone)
            if not self._holders[key]:
                del self._holders[key]

    def waiting(self, replica: str) -> int:
        """Return the number of samples at a replica that have not begun."""
        return self._loads[replica].waiting

    def running(self, replica: str) -> int:
        """Return the number of samples at a replica that have begun and not ended."""
        return self._loads[replica].running

    def score(self, replica: str) -> int:
        """Return the load of a replica. Lower is better."""
        return self._loads[replica].score

    # -- requests ----------------------------------------------------------------------------------

    def place(
        self,
        prompt: Sequence[int],
        num_samples: int = 1,
        *,
        session: Hashable | None = None,
        salt: str | None = None,
        version: int = 0,
        adapter: str | None = None,
        without: Collection[str] = (),
    ) -> Ticket:
        """Choose a replica for a request, and count the request there.

        Args:
            prompt: Token ids. Not kept.
            num_samples: Number of samples of the request.
            session: Session of the request. A session stays at one replica.
            salt: Cache salt. Prefixes are shared only between requests with the same salt.
            version: Version of the weights that will compute the request.
            adapter: Name and version of its adapter, if it has one.
            without: Replicas to exclude.

        Raises `NoReplica`.
        """
        able = self._open
        if without:
            able = {name: load for name, load in able.items() if name not in without}
        if not able:
            raise NoReplica("no replica accepts requests.")
        keys = self._keys(prompt, (salt, version, adapter))
        hits = self._found(keys, able)
        load = None if session is None else able.get(self._sessions.get(session, ""))
        if load is None:
            load, cached = self._cheapest(hits, able)
        else:
            cached = max((end for end, holders in hits if load in holders), default=0)
        self._remember(keys, load)
        if session is not None:
            self._sessions[session] = load.replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return self._ticket(load, num_samples, cached)

    def place_at(self, replica: str, num_samples: int = 1) -> Ticket:
        """Count a request at this replica, even if it is draining. Raises `KeyError`."""
        return self._ticket(self._loads[replica], num_samples, 0)

    def started(self, ticket: Ticket, num_samples: int | None = None) -> None:
        """Record that `num_samples` of a request (None: all) have begun."""
        began = ticket.waiting if num_samples is None else min(num_samples, ticket.waiting)
        ticket.waiting -= began
        ticket.running += began
        ticket._load.count(-began, began)

    def finished(self, ticket: Ticket, num_samples: int | None = None) -> None:
        """Record that `num_samples` of a request (None: all) have ended or left the replica."""
        left = ticket.running + ticket.waiting
        ended = left if num_samples is None else min(num_samples, left)
        ran = min(ended, ticket.running)
        ticket.running -= ran
        ticket.waiting -= ended - ran
        ticket._load.count(ran - ended, -ran)

    # -- inside ------------------------------------------------------------------------------------

    def _ticket(self, load: _Load, num_samples: int, cached: int) -> Ticket:
        self._num_placed += 1
        load.count(num_samples, 0, chosen=self._num_placed)
        return Ticket(load.replica, num_samples, cached=cached, _load=load)

    def _keys(self, prompt: Sequence[int], root: Hashable) -> list[tuple[int, int]]:
        """Return the prompt's keys, each with the number of tokens it covers, shortest first."""
        piece, keys = self._piece, list[tuple[int, int]]()
        key, length = hash(root), len(prompt)
        for end in self._ends:
            if end > length:
                break
            key = hash((key, tuple(prompt[end - piece : end : STRIDE])))
            keys.append((key, end))
        return keys

    def _found(
        self, keys: list[tuple[int, int]], able: Mapping[str, _Load]
    ) -> list[tuple[int, set[_Load]]]:
        """Return prefix lengths in tokens with the replicas that hold them, shortest first: the
        longest prefix of each set of replicas.
        """
        hits = list[tuple[int, set[_Load]]]()
        for key, end in keys:
            holders = self._holders.get(key)
            if not holders:
                break
            if hits:
                holders = hits[-1][1] & holders
                if len(holders) == len(hits[-1][1]):
                    hits.pop()
            else:
                holders = {each for each in holders if each.replica in able}
            if not holders:
                break
            hits.append((end, holders))
        return hits

    def _cheapest(
        self, hits: list[tuple[int, set[_Load]]], able: Mapping[str, _Load]
    ) -> tuple[_Load, int]:
        """Return the replica of the lowest cost, and how many tokens of the prompt it holds. At
        equal cost, the holder of most tokens wins.
        """
        order = attrgetter("order")
        best, cached = min(able.values(), key=order), 0
        cost = best.score
        for end, holders in reversed(hits):
            load = min(holders, key=order)
            load_cost = load.score - end // self._piece * self._worth
            if load_cost < cost or (load_cost == cost and not cached):
                best, cost, cached = load, load_cost, end
        return best, cached

    def _remember(self, keys: list[tuple[int, int]], load: _Load) -> None:
        holders = self._holders
        for key, _ in reversed(keys):  # first keys, which most prompts share, are dropped last
            holders.setdefault(key, set()).add(load)
            holders.move_to_end(key)
        most = self._max_keys if self._max_keys is not None else KEYS * len(self._loads)
        while len(holders) > most:
            holders.popitem(last=False)


def _half_octaves(count: int) -> list[int]:
    """Return the first `count` of 1, 2, 3, 4, 6, 8, 12, 16, 24 …"""
    return [1, *((2 + at % 2) << at // 2 for at in range(count - 1))]

"""`Router`: which replica takes the next request. Pure: no clock, no asyncio, no engine; it only
counts.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from nano_inference.fleet.errors import NoReplica

WAITING = 4  # a sample that waits weighs as much as so many that run
# Only every so many tokens of a piece are in its key: prompts hardly ever differ in others alone.
STRIDE = 4
KEYS = 4096  # prefixes that are remembered for every replica


@dataclass(slots=True, eq=False)
class _Load:
    """Samples of one replica."""

    replica: str
    waiting: int = 0
    running: int = 0
    order: tuple[int, int] = (0, 0)  # its score, and when it was last chosen

    @property
    def score(self) -> int:
        return self.waiting * WAITING + self.running

    def count(self, waiting: int, running: int, chosen: int | None = None) -> None:
        """Add samples; `chosen`: the number of the placement that they came with."""
        self.waiting += waiting
        self.running += running
        self.order = self.score, self.order[1] if chosen is None else chosen


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place. `Router.started` and `Router.finished` take it.

    Attributes:
        replica: its name.
        waiting: samples of the request that have not begun.
        running: samples that have begun and not ended.
        cached: prompt tokens whose keys and values that replica probably has.
    """

    replica: str
    waiting: int
    running: int = 0
    cached: int = 0
    _load: _Load = field(default_factory=lambda: _Load(""), repr=False)


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
    looked at), with the salt, the weight version and the adapter at their root. A key names the
    replicas that were sent such a prompt. There are at most `max_keys`, and the ones least recently
    used go. A wrong guess costs a prefill and no bit, so replicas do not report what they evict; an
    update changes the version and so the keys.

    **Sessions**: requests with the same session go where the last one went, as long as that replica
    takes requests. `max_sessions` are remembered, the ones least recently used go.

    A *draining* replica takes nothing new and keeps what it has. Nothing here waits or reads a
    clock.

    Args:
        piece: tokens that a key looks at.
        most_keys: of one prompt.
        piece_worth: score that a cached piece is worth.
        max_keys: prefixes that are remembered, some 400 bytes each; None: `KEYS` for every replica.
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
        self._holders: OrderedDict[int, set[_Load]] = OrderedDict()  # by key
        self._sessions: OrderedDict[Hashable, str] = OrderedDict()
        self._loads: dict[str, _Load] = {}
        self._open: dict[str, _Load] = {}  # of replicas that take requests
        self._num_placed = 0

    # -- replicas ----------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names, in the order in which they came."""
        return tuple(self._loads)

    def add(self, replica: str) -> None:
        """A replica takes requests from now on. Raises `ValueError` for a name that is there."""
        if replica in self._loads:
            raise ValueError(f"there is a replica {replica!r} already.")
        self._loads[replica] = self._open[replica] = _Load(replica)

    def remove(self, replica: str) -> None:
        """It is gone; tickets of it count no more. Raises `KeyError` for one that is not there."""
        self.forget(replica)
        del self._loads[replica]
        self._open.pop(replica, None)

    def drain(self, replica: str, draining: bool = True) -> None:
        """It takes nothing new; with `draining=False` it does again. Raises `KeyError`."""
        load = self._loads[replica]
        if draining:
            self._open.pop(replica, None)
        else:
            self._open[replica] = load

    def is_draining(self, replica: str) -> bool:
        """Whether it takes nothing new. Raises `KeyError`."""
        return self._loads[replica].replica not in self._open

    def forget(self, replica: str | None = None) -> None:
        """The prefix cache of this replica (None: of all) is empty."""
        if replica is None:
            self._holders.clear()
            return
        gone = self._loads[replica]
        for key in [key for key, holders in self._holders.items() if gone in holders]:
            self._holders[key].discard(gone)
            if not self._holders[key]:
                del self._holders[key]

    def waiting(self, replica: str) -> int:
        """Samples there that have not begun."""
        return self._loads[replica].waiting

    def running(self, replica: str) -> int:
        """Samples there that have begun and not ended."""
        return self._loads[replica].running

    def score(self, replica: str) -> int:
        """Its load; the lower the better."""
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
        """Choose a replica for a request, and count it there.

        Args:
            prompt: token ids; not kept.
            num_samples: of the request.
            session: requests of the same one go to the same replica.
            salt: prefixes are shared only between requests of the same salt.
            version: of the weights that will compute it.
            adapter: name and version of the adapter that will, if one does.
            without: replicas that are not to get it.

        Raises `NoReplica`.
        """
        able = self._open
        if without:
            able = {name: load for name, load in able.items() if name not in without}
        if not able:
            raise NoReplica("no replica takes requests.")
        keys = self._keys(prompt, (salt, version, adapter))
        found = self._found(keys, able)
        load = None if session is None else able.get(self._sessions.get(session, ""))
        if load is None:
            load, cached = self._cheapest(found, able)
        else:
            cached = max((end for end, holders in found if load in holders), default=0)
        self._remember(keys, load)
        if session is not None:
            self._sessions[session] = load.replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        return self._ticket(load, num_samples, cached)

    def place_at(self, replica: str, num_samples: int = 1) -> Ticket:
        """Count a request at this replica, draining or not. Raises `KeyError`."""
        return self._ticket(self._loads[replica], num_samples, 0)

    def started(self, ticket: Ticket, num_samples: int | None = None) -> None:
        """So many samples of a request (None: all) wait no more."""
        began = ticket.waiting if num_samples is None else min(num_samples, ticket.waiting)
        ticket.waiting -= began
        ticket.running += began
        ticket._load.count(-began, began)

    def finished(self, ticket: Ticket, num_samples: int | None = None) -> None:
        """So many samples of a request (None: all) have ended, or left."""
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
        """(key, tokens that it stands for), from the first piece on."""
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
        """(tokens, replicas that hold them), from short to long: the longest for each set."""
        found = list[tuple[int, set[_Load]]]()
        for key, end in keys:
            holders = self._holders.get(key)
            if not holders:
                break
            if found:
                holders = found[-1][1] & holders
                if len(holders) == len(found[-1][1]):
                    found.pop()
            else:
                holders = {each for each in holders if each.replica in able}
            if not holders:
                break
            found.append((end, holders))
        return found

    def _cheapest(
        self, found: list[tuple[int, set[_Load]]], able: Mapping[str, _Load]
    ) -> tuple[_Load, int]:
        """The replica of the lowest cost, and how much of the prompt it holds. Of replicas that
        cost the same it is the one that holds most.
        """
        order = attrgetter("order")
        best, cached = min(able.values(), key=order), 0
        cost = best.score
        for end, holders in reversed(found):
            load = min(holders, key=order)
            its = load.score - end // self._piece * self._worth
            if its < cost or (its == cost and not cached):
                best, cost, cached = load, its, end
        return best, cached

    def _remember(self, keys: list[tuple[int, int]], load: _Load) -> None:
        holders = self._holders
        for key, _ in reversed(keys):  # the first ones, which most prompts share, go last
            holders.setdefault(key, set()).add(load)
            holders.move_to_end(key)
        most = self._max_keys if self._max_keys is not None else KEYS * len(self._loads)
        while len(holders) > most:
            holders.popitem(last=False)


def _half_octaves(count: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 …, so many."""
    return [1, *((2 + at % 2) << at // 2 for at in range(count - 1))]

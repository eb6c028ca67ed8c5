"""The router: a thousand random histories against a model that counts by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.fleet.router import NoReplica, Router, Ticket
from tests.depth import at_depth

PIECE = 4


def router(*names: str, **options: Any) -> Router:
    made = Router(piece=PIECE, **options)
    for name in names:
        made.add(name)
    return made


class Lives:
    """A router and all its inputs, counted by hand."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.it = router("0", "1")
        self.live = list[Ticket]()
        self.draining = set[str]()
        self.num_made = 2

    def one_of(self, things: Any) -> Any:
        return self.draw(st.sampled_from(list(things)))

    def place(self) -> None:
        it, names = self.it, self.it.replicas
        prompt, count = (
            [self.draw(st.integers(0, 1))] * self.draw(st.integers(0, 14)),
            self.draw(st.integers(1, 3)),
        )
        session = self.one_of([None, "a", "b"])
        without = self.draw(st.sets(st.sampled_from(names))) if names else set[str]()
        able = set(names) - self.draining - without
        if not able:
            with pytest.raises(NoReplica):
                it.place(prompt, count, session=session, without=without)
            return
        least = min(map(it.score, able))
        ticket = it.place(prompt, count, session=session, without=without)
        self.live.append(ticket)
        assert ticket.replica in able
        assert ticket.cached <= len(prompt)
        if session is None:  # the prefix is worth more than the queue
            assert it.score(ticket.replica) - 4 * count - ticket.cached // PIECE <= least

    def started(self) -> None:
        if self.live:
            self.it.started(self.one_of(self.live), self.one_of([None, 1]))

    def finished(self) -> None:
        if self.live:
            self.it.finished(self.one_of(self.live), self.one_of([None, 1]))
            self.live = [each for each in self.live if each.waiting or each.running]

    def add(self) -> None:
        self.it.add(str(self.num_made))
        self.num_made += 1

    def remove(self) -> None:
        if self.it.replicas:
            gone = self.one_of(self.it.replicas)
            self.it.remove(gone)
            self.draining.discard(gone)
            for ticket in self.live:
                if ticket.replica == gone:
                    self.it.finished(ticket)  # no longer counts
            self.live = [each for each in self.live if each.replica != gone]

    def drain(self) -> None:
        if self.it.replicas:
            name = self.one_of(self.it.replicas)
            self.it.drain(name, name not in self.draining)
            self.draining ^= {name}

    def check(self) -> None:
        it, live = self.it, self.live
        for name in it.replicas:
            assert it.waiting(name) == sum(each.waiting for each in live if each.replica == name)
            assert it.running(name) == sum(each.running for each in live if each.replica == name)
            assert it.is_draining(name) == (name in self.draining)


@settings(max_examples=at_depth(60), deadline=None)
@given(st.data())
def test_router_counts_match_the_open_requests(data: st.DataObject) -> None:
    lives = Lives(data)
    for _ in range(data.draw(st.integers(1, 30))):
        getattr(
            lives,
            lives.one_of(
                ["place", "place", "place", "started", "finished", "add", "remove", "drain"]
            ),
        )()
        lives.check()


def test_router_rotates_equal_replicas_and_spares_loaded_ones() -> None:
    it = router("0", "1", "2")
    first = [it.place([9]) for _ in range(6)]
    assert sorted(each.replica for each in first) == ["0", "0", "1", "1", "2", "2"]
    it.finished(first[0])
    assert it.place([9]).replica == first[0].replica
    for each in first[1:]:
        it.started(each)
    assert [it.score(name) for name in "012"].count(2) == 2  # running requests weigh a quarter


def test_router_rotates_equal_replicas_between_idle_periods() -> None:
    it = router("0", "1", "2")
    chosen = list[str]()
    for number in range(9):
        ticket = it.place([number])
        chosen.append(ticket.replica)
        it.started(ticket)
        it.finished(ticket)
    assert chosen == ["0", "1", "2"] * 3
    holders = [
        it.place([7] * PIECE, without=without) for without in (("1", "2"), ("0", "2"), ("0", "1"))
    ]
    for ticket in holders:  # replicas that hold the same prefix rotate too
        it.finished(ticket)
    chosen.clear()
    for _ in range(6):
        ticket = it.place([7] * PIECE)
        chosen.append(ticket.replica)
        it.finished(ticket)
    assert chosen == ["0", "1", "2"] * 2


def test_longest_prefix_wins_until_its_holder_is_overloaded() -> None:
    it = router("0", "1", piece_worth=3)
    prompt = list(range(4 * PIECE))
    first = it.place(prompt)
    it.finished(first)
    other = "1" if first.replica == "0" else "0"
    shared = prompt[: 2 * PIECE] + [77] * PIECE
    for _ in range(2):  # 2 pieces are worth 6: the second request joins one that waits
        ticket = it.place(shared)
        assert (ticket.replica, ticket.cached >= 2 * PIECE) == (first.replica, True)
    ticket = it.place(prompt)  # 4 pieces are worth 12, two waiting requests cost 8
    assert (ticket.replica, ticket.cached) == (first.replica, 4 * PIECE)
    assert it.place([5, *prompt]).replica == other  # different prefix
    assert it.place(prompt[:PIECE]).replica == other  # 1 piece is worth 3


def test_prefixes_are_hidden_by_salts_versions_and_flushes() -> None:
    it = router("0", "1")
    prompt = list(range(2 * PIECE))
    it.finished(it.place(prompt, salt="a", version=1))
    assert it.place(prompt, salt="a", version=1).cached == 2 * PIECE
    assert it.place(prompt, version=1).cached == it.place(prompt, salt="a", version=2).cached == 0
    it.forget()
    assert it.place(prompt, salt="a", version=1).cached == 0


def test_prefixes_are_hidden_by_adapters() -> None:
    it = router("0")
    prompt = list(range(2 * PIECE))
    it.place(prompt)
    assert it.place(prompt, adapter="own@1").cached == 0
    assert it.place(prompt, adapter="own@1").cached == 2 * PIECE


def test_replica_in_a_reused_slot_starts_without_prefixes() -> None:
    it = router("0")
    prompt = list(range(2 * PIECE))
    old = it.place(prompt, 3)
    it.remove("0")
    it.add("0")
    it.finished(old)
    assert (it.waiting("0"), it.running("0")) == (0, 0)
    assert it.place(prompt).cached == 0


def test_sessions_stick_while_their_replica_takes_requests() -> None:
    it = router("0", "1", max_sessions=2)
    home = it.place([1], session="a").replica
    for _ in range(9):
        assert it.place([1], session="a").replica == home
    it.drain(home)
    away = it.place([1], session="a").replica
    assert away != home
    it.drain(home, False)
    assert it.place([1], session="a").replica == away
    it.place([1], session="b")
    it.place([1], session="c")
    assert len(it._sessions) == 2


def test_prefix_memory_is_bounded_and_keeps_the_common_start() -> None:
    it = router("0", "1", max_keys=10)
    stem = [1] * PIECE
    for number in range(50):
        it.finished(it.place([*stem, *[number] * PIECE]))
    assert len(it._holders) == 10
    assert it.place(stem).cached == PIECE


def test_long_prompts_cost_little_more_than_short_ones() -> None:
    it = router("0", most_keys=12)
    prompt = list(range(10**5))
    ends = [end for _, end in it._keys(prompt, None)]
    assert ends == [PIECE * count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
    for index, end in enumerate(ends):
        other = [*prompt[: end - PIECE], *[-1] * PIECE, *prompt[end:]]
        same = [a == b for a, b in zip(it._keys(prompt, None), it._keys(other, None), strict=True)]
        assert same == [True] * index + [False] * (len(ends) - index)


def test_slow_replica_gets_less() -> None:
    it = router("fast", "slow")
    counts = {"fast": 0, "slow": 0}
    live = [it.place([number]) for number in range(16)]
    for step in range(400):
        for name, each in (("fast", 1), ("slow", 4)):
            ended = next(
                (ticket for ticket in live if ticket.replica == name and step % each == 0), None
            )
            if ended is not None:
                it.finished(ended)
                live.remove(ended)
                live.append(it.place([step]))
                counts[live[-1].replica] += 1
    assert counts["fast"] > 3 * counts["slow"]

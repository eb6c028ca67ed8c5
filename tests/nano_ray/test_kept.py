"""A new replica receives exactly the updates that make up the live version."""

import json

from hypothesis import given
from hypothesis import strategies as st

from nano_ray.kept import Bucket, KeptWeights

NAMES = "abcde"


def bucket(names: frozenset[str], content: object = None) -> Bucket:
    return Bucket(
        json.dumps({"buckets": [[[name, "float32", [1], None] for name in names]]}).encode(),
        content,
    )


def test_version_0_has_no_changes() -> None:
    assert KeptWeights().version == 0
    assert KeptWeights().updates == ()


def test_whole_update_replaces_all_before() -> None:
    kept = KeptWeights().after(1, [bucket(frozenset("ab"))]).after(3, [bucket(frozenset("abc"))])
    assert [update.version for update in kept.updates] == [3]


def test_partial_update_keeps_the_rest() -> None:
    kept = (
        KeptWeights()
        .after(1, [bucket(frozenset("ab")), bucket(frozenset("c"))])
        .after(2, [bucket(frozenset("bc"))])
    )
    assert [
        (update.version, [each.names for each in update.buckets]) for update in kept.updates
    ] == [
        (1, [frozenset("ab")]),
        (2, [frozenset("bc")]),
    ]


@st.composite
def updates(draw: st.DrawFn) -> list[list[frozenset[str]]]:
    """Return the buckets of each update. Updates share no tensor name."""
    results: list[list[frozenset[str]]] = []
    for _ in range(draw(st.integers(1, 6))):
        names = draw(st.sets(st.sampled_from(NAMES), min_size=1))
        cut = draw(st.integers(0, len(names)))
        ordered = sorted(names)
        results.append([frozenset(part) for part in (ordered[:cut], ordered[cut:]) if part])
    return results


@given(updates())
def test_kept_updates_restore_the_same_weights(history: list[list[frozenset[str]]]) -> None:
    everything: dict[str, int] = {}
    states: list[dict[str, int]] = [{}]  # from every version
    kept = KeptWeights()
    for version, buckets in enumerate(history, start=1):
        kept = kept.after(version, [bucket(names, version) for names in buckets])
        everything |= {name: version for names in buckets for name in names}
        for has, before in enumerate(states):
            made = dict(before)
            for update in kept.since(has):
                for each in update.buckets:
                    made |= dict.fromkeys(each.names, each.content)
            assert made == everything
        states.append(dict(everything))
        assert kept.version == version
        serving = [each for update in kept.updates for each in update.buckets]
        assert all(any(everything[name] == each.content for name in each.names) for each in serving)

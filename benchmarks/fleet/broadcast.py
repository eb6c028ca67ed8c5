"""New weights to many replicas: a tree that passes chunks on, against one sender for all. Simulated
time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]


@dataclass(frozen=True)
class Broadcast:
    """One update.

    Attributes:
        replicas: receivers; the trainer is the root and not one of them.
        degree: receivers that each node sends to; as many as there are replicas: flat.
        num_bytes: of the weights.
        chunk: bytes that are passed on as soon as they are there; as many as `num_bytes`: nothing
            is passed on before all has arrived.
        bandwidth: bytes a second out of a node, and into one, at the same time.
        latency: seconds from the end of sending to the beginning of passing on.
    """

    replicas: int = 1000
    degree: int = 2
    num_bytes: float = 16e9
    chunk: float = 64e6
    bandwidth: float = 35e9
    latency: float = 100e-6


def arrivals(cast: Broadcast) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """When each replica has all, nearest to the root first.

    A node sends chunk by chunk, each to its children in order, one at a time; a child has a chunk
    when it was sent whole, and the latency later.
    """
    chunks = -(-int(cast.num_bytes) // int(cast.chunk))
    each = cast.num_bytes / chunks / cast.bandwidth
    # the trainer has everything at 0
    level, done, left = np.zeros((1, chunks)), [np.zeros(0)], cast.replicas
    while left:
        children = min(left, len(level) * cast.degree)
        # As even as possible: no node has two children more than another.
        counts = np.full(len(level), children // len(level))
        counts[: children % len(level)] += 1
        level = np.concatenate(
            [_sent(level[counts == count], count, each) for count in np.unique(counts) if count]
        )
        level += cast.latency
        done.append(level[:, -1])
        left -= children
    return np.concatenate(done)


def _sent(ready: "np.ndarray[Any, Any]", count: int, each: float) -> "np.ndarray[Any, Any]":
    """Of nodes that have chunks at these times [nodes, chunks], when each of `count` children was
    sent them.
    """
    order = np.repeat(ready, count, axis=1)
    places = each * np.arange(order.shape[1])
    # begins when it is there and the node is free
    ends = np.maximum.accumulate(order - places, axis=1) + places + each
    return ends.reshape(len(ready), -1, count).transpose(0, 2, 1).reshape(len(ready) * count, -1)


def measure(cast: Broadcast) -> Row:
    """When the median and the last replica have all, against the least possible."""
    times = arrivals(cast)
    least = cast.num_bytes / cast.bandwidth
    flat = cast.degree >= cast.replicas
    shape = "flat" if flat else "chain" if cast.degree == 1 else f"degree {cast.degree}"
    whole = cast.chunk >= cast.num_bytes
    size = "whole" if whole else f"{cast.chunk / 1e6:g} MB"
    return {
        "name": f"broadcast {cast.num_bytes / 1e9:g} GB, {shape}, {size}",
        "replicas": cast.replicas,
        "degree": cast.degree,
        "chunk": cast.chunk,
        "bandwidth": cast.bandwidth,
        "latency": cast.latency,
        "median": round(float(np.median(times)), 3),
        "last": round(float(times.max()), 3),
        "least": round(least, 3),
    }


def cases(replicas: int = 1000) -> list[Broadcast]:
    """Of an 8B and a 70B model in bfloat16."""
    found: list[Broadcast] = []
    for num_bytes in (16.1e9, 141.1e9):
        found.append(Broadcast(replicas, replicas, num_bytes, num_bytes))
        found += [Broadcast(replicas, degree, num_bytes, num_bytes) for degree in (2, 4)]
        found += [Broadcast(replicas, degree, num_bytes) for degree in (1, 2, 4, 8)]
        found += [Broadcast(replicas, 1, num_bytes, 8e6), Broadcast(replicas, 2, num_bytes, 8e6)]
    return found

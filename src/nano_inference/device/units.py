"""Unit tables of blocks on a device."""

from nano_inference.arrays import Device, Tensor, namespace
from nano_inference.kv_cache.sliding_window import UnitPool


def sent(tensor: Tensor, device: Device) -> Tensor:
    """Copy a small host tensor to a device, in stream order. The host does not wait."""
    return (
        tensor.to(device)
        if device.type == "cpu"
        else tensor.pin_memory().to(device, non_blocking=True)
    )


class UnitMap:
    """Each block's units on the device: a mirror of `UnitPool.unit_of` for all storages."""

    def __init__(self, pool: UnitPool, device: Device) -> None:
        self.layout, self.num_units = pool.layout, pool.num_units
        self._pool = pool
        xp = namespace(device)
        self._host = xp.frombuffer(pool.unit_of, dtype=xp.int64).reshape(
            pool.layout.num_units, pool.num_blocks
        )
        # a CPU reads the pool's own memory
        self._units = self._host if device.type == "cpu" else self._host.to(device)

    def units(self) -> Tensor:
        """Return the current units [units of a block, blocks]."""
        if self._units is not self._host and self._pool.changed:
            xp = namespace(self._host)
            blocks = xp.tensor(sorted(self._pool.changed))
            changed = sent(xp.cat([blocks[None], self._host[:, blocks]]), self._units.device)
            self._units[:, changed[0]] = changed[1:]  # in place: captured graphs read it
            self._pool.changed.clear()
        return self._units

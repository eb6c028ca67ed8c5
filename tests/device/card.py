"""A fake card: invented `DeviceMemory` figures, and no allocations."""

from dataclasses import dataclass

from nano_inference.device.memory_profile import DeviceMemory, MemoryReading


@dataclass
class Card(DeviceMemory):
    """Memory in bytes: the card's total, other processes, and this engine's weights and largest
    step.
    """

    total: int
    others: int = 0
    weights: int = 0
    step: int = 0
    loaded: bool = True
    pooled: bool = False  # the weights are in a pool, which torch does not count
    cached: int = 0  # cached by torch and used by no tensor
    released: int = 0  # number of releases
    ran: bool = False

    def read(self) -> MemoryReading:
        weights = self.weights if self.loaded else 0
        allocated = 0 if self.pooled else weights
        reserved = allocated + self.cached
        peak = allocated + (self.step if self.ran else 0)
        free = self.total - self.others - weights - self.cached
        return MemoryReading(self.total, free, reserved, allocated, peak)

    def reset_peak(self) -> None:
        self.ran = True  # the next measurement is the step

    def release(self) -> None:
        self.released += 1
        self.cached = 0

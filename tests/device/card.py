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
    cached: int = 0  # cached by torch and used by no tensor
    released: int = 0  # number of releases
    ran: bool = False

    def read(self) -> MemoryReading:
        allocated = self.weights if self.loaded else 0
        reserved = allocated + self.cached
        peak = allocated + (self.step if self.ran else 0)
        return MemoryReading(
            self.total, self.total - self.others - reserved, reserved, allocated, peak
        )

    def reset_peak(self) -> None:
        self.ran = True  # the next measurement is the step

    def release(self) -> None:
        self.released += 1
        self.cached = 0

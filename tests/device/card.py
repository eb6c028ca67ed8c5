"""A card that is none: what `DeviceMemory` tells is made up, and nothing is allocated on it."""

from dataclasses import dataclass

from nano_inference.device.memory_profile import DeviceMemory, MemoryReading


@dataclass
class Card(DeviceMemory):
    """Memory in bytes: the card's, what others hold of it, what this engine's weights and its
    largest step take.
    """

    total: int
    others: int = 0
    weights: int = 0
    step: int = 0
    loaded: bool = True
    cached: int = 0  # what torch keeps and no tensor stands in
    released: int = 0  # times that it was given back
    ran: bool = False

    def read(self) -> MemoryReading:
        allocated = self.weights if self.loaded else 0
        reserved = allocated + self.cached
        peak = allocated + (self.step if self.ran else 0)
        return MemoryReading(
            self.total, self.total - self.others - reserved, reserved, allocated, peak
        )

    def reset_peak(self) -> None:
        self.ran = True  # what is measured next is the step

    def release(self) -> None:
        self.released += 1
        self.cached = 0

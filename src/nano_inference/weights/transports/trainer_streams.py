"""Choice of the receiver for a trainer's updates that describe themselves."""

from nano_inference.parallel.process_group import ProcessGroup
from nano_inference.weights.transports.broadcast import GroupReceiver
from nano_inference.weights.transports.interface import WeightTransport
from nano_inference.weights.transports.layer_pickles import LayerPickles
from nano_inference.weights.transports.reuse import ReusedMemory
from nano_inference.weights.transports.trainer_broadcasts import TrainerGroup


def stream_of(joined: TrainerGroup, memory: ReusedMemory) -> WeightTransport:
    """Return a receiver of the updates of `WeightSender.over`, or of prime-rl's over a group of
    PyNccl.
    """
    group = joined.group
    if isinstance(group, ProcessGroup):
        return GroupReceiver(group, group.device, memory)
    return LayerPickles(group, memory)

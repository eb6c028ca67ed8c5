"""`ncclUniqueId`, whose pickle vLLM's trainers send."""

import ctypes

from nano_inference.parallel.nccl import UNIQUE_ID_BYTES


class ncclUniqueId(ctypes.Structure):  # noqa: N801 (the name is part of the pickle)
    """Id of a group of NCCL."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]

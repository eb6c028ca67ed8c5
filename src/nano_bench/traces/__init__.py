"""Traces of agents: read public formats, replay them on a server, make synthetic ones."""

from nano_bench.traces.model import (
    Conversation as Conversation,
)
from nano_bench.traces.model import (
    Trace as Trace,
)
from nano_bench.traces.model import (
    TraceError as TraceError,
)
from nano_bench.traces.model import (
    Turn as Turn,
)
from nano_bench.traces.read import (
    read_trace as read_trace,
)

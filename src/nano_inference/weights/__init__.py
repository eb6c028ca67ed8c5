"""The weights that an engine serves, and how they change.

- `update`: a weight set by the names of its checkpoint, and one update of it: its buckets are
  checked and put aside, then written together.
- `sources`: what an update may be given as.
- `sync`: `WeightSyncManager`, which orders updates and owns the version, and what an engine does
  about its requests: blocking or not, and `kv_policy`.

`nano_inference.weights.transports` brings updates from other processes.
"""

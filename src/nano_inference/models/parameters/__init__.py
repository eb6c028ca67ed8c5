"""The parameters of a model: their table, the destinations of checkpoint tensors, and storage."""

"""The parameters of a model: their table, where checkpoint tensors go, memory and numbers."""

"""Blocks: the parts of a decoder's layers, one kind in each file.

`build.py` chooses the blocks of every layer from a table when the decoder is built. A Llama is
`layer.py`, `attention.py`, `linear.py` and `mlp.py`.
"""

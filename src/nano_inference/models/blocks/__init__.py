"""Blocks: the parts that the layers of a decoder are made of, one kind a file.

`build.py` chooses the blocks of every layer from a table when the decoder is built. A Llama is
`layer.py`, `attention.py`, `linear.py` and `mlp.py`.
"""

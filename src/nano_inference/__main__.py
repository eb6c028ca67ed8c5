"""Entry point of `python -m nano_inference`, which runs the command `nano-inference`."""

from nano_inference.cli import app

app(prog_name="nano-inference")

"""`python -m nano_inference` is the command `nano-inference`."""

from nano_inference.cli import app

app(prog_name="nano-inference")

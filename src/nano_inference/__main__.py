"""Entry point of the command `nano-inference` and of `python -m nano_inference`."""

import gc

# Almost all objects of a start live until the end, and each collection looks at all of them.
THRESHOLDS = (50_000, 20, 50)


def main() -> None:
    """Run the command line, with rarer collections of garbage."""
    gc.set_threshold(*THRESHOLDS)
    from nano_inference.cli import app

    app(prog_name="nano-inference")


if __name__ == "__main__":
    main()

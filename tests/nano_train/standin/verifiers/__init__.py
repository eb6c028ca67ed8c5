"""A stand-in for verifiers 0.4, where it is not installed: the part that nano_train uses, and as
much as the tests' environment needs. `test_environments_of_verifiers.py` runs the same tests with
the package itself.
"""

__version__ = "0.4.0"

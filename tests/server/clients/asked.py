"""The common request of all clients of structured output, and the report of its result.

A separate interpreter runs the clients, since their packages differ from those of the tests.
"""
# pyright: reportMissingImports=false

import json
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]
MODEL = "smollm2-135m"
TEXT = "A dog that is four years old, and tame."


class Pet(BaseModel):
    """A pet."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)
    tame: bool


def tell(**pets: object) -> None:
    """Print the result by method: a `Pet`, or data to build one."""
    print(json.dumps({way: dict(pet) for way, pet in pets.items()}))  # pyright: ignore

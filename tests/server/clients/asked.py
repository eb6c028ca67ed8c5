"""What every client of structured output asks for, and how it tells what came. Their own interpreter
runs them: it has other packages than the tests.
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
    """By way of asking, what came: a `Pet`, or what is to be one."""
    print(json.dumps({way: dict(pet) for way, pet in pets.items()}))  # pyright: ignore

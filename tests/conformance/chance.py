"""Choices: by hypothesis, which makes what fails small, or by a seeded generator, which needs no history."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """chance(30) is true 30 times in a hundred, chance.one("a", "b") one of these; the first is the simplest.

    `below(n)` gives a whole number from 0 up to n - 1.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    def __call__(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def one(self, *values: T) -> T:
        return values[self.below(len(values))]

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)

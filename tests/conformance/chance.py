"""Make random choices, either by hypothesis, which reduces failing examples, or by a seeded
generator, whose choices can be repeated from the seed."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """chance(30) is True in 30 % of the calls; chance.one("a", "b") returns one of its arguments.
    Hypothesis simplifies a failing example by choosing the first argument.

    `below(n)` returns an integer from 0 to n - 1.
    """

    def __init__(self, below: Callable[[int], int]) -> None:
        self.below = below

    def __call__(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def one(self, *values: T) -> T:
        return values[self.below(len(values))]

    def between(self, least: int, most: int) -> int:
        return least + self.below(most - least + 1)

"""Random parts of names."""

import random


def random_suffix() -> str:
    """Five characters, as the API server appends to `generateName`."""
    return "".join(random.SystemRandom().choices("bcdfghjklmnpqrstvwxz2456789", k=5))

"""Kubernetes quantities: 512Mi, 1.5G, 500m, 1e3. Source: apimachinery's resource.Quantity."""

import re
from decimal import Decimal

QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?", re.ASCII)


def parse_quantity(text: object) -> Decimal:
    """Parse a quantity. Raises ValueError."""
    if not isinstance(text, bool):
        match = QUANTITY.fullmatch(str(text))
    else:
        match = None

    if not match:
        raise ValueError(f"{text!r} is not a quantity")

    number, unit = match.groups(default="")
    if unit.endswith("i"):
        return Decimal(number) * 1024 ** (1 + "KMGTPE".index(unit[0]))
    if unit[1:]:
        return Decimal(number + unit)

    # "n", "u", "m", "", "k", "M", ... stand for 1000 to the power of -3, -2, -1, 0, 1, 2, ...
    return Decimal(number) * Decimal(1000) ** ("num kMGTPE".index(unit or " ") - 3)

"""Packages that import their public names on first use."""

import sys
from importlib import import_module

TYPE_CHECKING = False  # typing's would import twenty modules before a program can handle Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def exports(
    package: str, names: "Mapping[str, tuple[str, ...]]"
) -> "tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]":
    """`__all__`, `__getattr__` and `__dir__` of a package; `names`: module → its public names."""
    modules = {name: f"{package}.{module}" for module, public in names.items() for name in public}
    known = vars(sys.modules[package])

    def load(name: str) -> "Any":
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'", name=name, obj=sys.modules[package])
        known[name] = getattr(import_module(modules[name]), name)
        return known[name]

    return [*modules], load, lambda: [*known, *modules]

"""Run, lint and test Argo Workflows on this machine, without a cluster (docs/argolocal.md).

    outcome = argolocal.run("workflow.yaml", {"message": "hello"})
    print(outcome.phase, outcome.nodes["print"].log)

The names in PUBLIC_NAMES are the public API; each name is imported on first use.
"""

import sys
from importlib import import_module

# Do not import `typing`: it loads twenty modules, and Ctrl-C during this time prints a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

# module → its public names; __init__.pyi declares the same names for type checkers
PUBLIC_NAMES = {
    "api": ("run", "lint", "Outcome", "Node"),
    "errors": ("ArgolocalError", "ConfigError", "StorageError"),
    "controllers.controller": ("Controller",),
    "controllers.controller_kinds": ("Kinds",),
    "pods.container_images": ("Image",),
    "store": ("ObjectStore", "FolderStore"),
}


def lazy_exports(
    package: str, names: "Mapping[str, tuple[str, ...]]"
) -> "tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]":
    """Return `__all__`, `__getattr__` and `__dir__` of a package that imports its public names on
    first use."""
    module_paths = {
        public_name: f"{package}.{module_name}"
        for module_name, public_names in names.items()
        for public_name in public_names
    }

    namespace = vars(sys.modules[package])

    def load(name: str) -> "Any":
        if name not in module_paths:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'", name=name, obj=sys.modules[package]
            )
        namespace[name] = getattr(import_module(module_paths[name]), name)
        return namespace[name]

    return [*module_paths], load, lambda: [*namespace, *module_paths]


__all__, __getattr__, __dir__ = lazy_exports(__name__, PUBLIC_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]

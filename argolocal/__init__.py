"""Runs, lints and tests Argo Workflows on this machine, without a cluster (docs/argolocal.md).

    outcome = argolocal.run("workflow.yaml", {"message": "hello"}); outcome.phase; outcome.nodes["print"].log

The names below are the public API; each is imported on first use.
"""

from importlib import import_module

NAMES = {  # module → its public names; __init__.pyi says the same to type checkers
    "api": ("run", "lint", "Outcome", "Node"),
    "errors": ("ArgolocalError", "ConfigError", "StorageError"),
    "controllers.base": ("Controller",),
    "controllers.kinds": ("Kinds",),
    "pods.container_images": ("Image",),
    "store": ("ObjectStore", "FolderStore"),
}
MODULES = {name: f"argolocal.{module}" for module, names in NAMES.items() for name in names}
__all__ = list(MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module 'argolocal' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(MODULES[name]), name)
    return value

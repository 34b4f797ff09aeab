"""Runs, lints and tests Argo Workflows on this machine, without a cluster (docs/argolocal.md).

    outcome = argolocal.run("workflow.yaml", {"message": "hello"}); outcome.phase; outcome.nodes["print"].log

The names below are the public API; each is imported on first use.
"""

from argolocal.common import lazy

NAMES = {  # module → its public names; __init__.pyi says the same to type checkers
    "api": ("run", "lint", "Outcome", "Node"),
    "errors": ("ArgolocalError", "ConfigError", "StorageError"),
    "controllers.base": ("Controller",),
    "controllers.kinds": ("Kinds",),
    "pods.container_images": ("Image",),
    "store": ("ObjectStore", "FolderStore"),
}
__all__, __getattr__, __dir__ = lazy.exports(__name__, NAMES)  # pyright: ignore[reportUnsupportedDunderAll]

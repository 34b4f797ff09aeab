from argolocal.api import Node, Outcome, lint, run
from argolocal.controllers.controller import Controller
from argolocal.controllers.controller_kinds import Kinds
from argolocal.errors import ArgolocalError, ConfigError, StorageError
from argolocal.pods.container_images import Image
from argolocal.store import FolderStore, ObjectStore

__all__ = [
    "ArgolocalError",
    "ConfigError",
    "Controller",
    "FolderStore",
    "Image",
    "Kinds",
    "Node",
    "ObjectStore",
    "Outcome",
    "StorageError",
    "lint",
    "run",
]

def lazy_exports(
    package: str, names: dict[str, tuple[str, ...]]
) -> tuple[list[str], object, object]: ...

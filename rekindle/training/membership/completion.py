"""Checks whether a run is complete, that is, whether `<out>/model.json` is in the object store.
Imports no torch."""

from typing import TYPE_CHECKING, Any

from rekindle.documents import InvalidDocument, ModelFile, read_object
from rekindle.errors import ConfigError, NotFound
from rekindle.names import show
from rekindle.training.membership.run_spec import RunSpec

if TYPE_CHECKING:
    from rekindle.storage import Store


def read_completed_model(spec: RunSpec) -> dict[str, Any] | None:
    """Return this run's `model.json` (`sha256`, `step`, ...), or None if it is not in the object
    store.

    Raises ConfigError if the file belongs to another run.
    """
    store = open_store()
    key = f"{spec.out}/model.json"

    try:
        model = read_object(ModelFile, store, key)
    except NotFound:
        return None
    except InvalidDocument as error:
        raise ConfigError(
            f"{error} Nothing was changed: remove the file, or give this run another `out` prefix."
        ) from error

    identity = model.identity
    if identity != spec.identity_hash():
        raise ConfigError(
            f"{store.uri(key)} is the model of another run (identity {show(identity[:12])}, this"
            f" run's is {spec.identity_hash()[:12]}): nothing was changed. Give this run another"
            " `out` prefix."
        )

    return model.as_json()


def open_store() -> "Store":
    """Return the object store that the environment variables configure. The first call imports the
    S3 library, which takes half a second."""
    from rekindle.storage import Store

    return Store.from_env()

"""Check whether a run is complete: `<out>/model.json` is in the object store. Imports no torch."""

import json
from typing import TYPE_CHECKING, Any

from rekindle.errors import ConfigError, NotFound
from rekindle.training.spec import TrainingSpec

if TYPE_CHECKING:
    from rekindle.storage import Store


def completed_model(spec: TrainingSpec) -> dict[str, Any] | None:
    """Return this run's `model.json` (`sha256`, `step`, ...), or None if it is not in the object store.

    Raises ConfigError if the file belongs to another run.
    """
    store, key = open_store(), f"{spec.out}/model.json"
    try:
        model = json.loads(store.get(key))
        identity = model["identity"]
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{store.uri(key)} is not a valid model.json ({error!r}): nothing was changed. Remove it, or give this "
            "run another `out` prefix."
        ) from error
    if identity != spec.identity_hash():
        raise ConfigError(
            f"{store.uri(key)} is the model of another run (identity {str(identity)[:12]}, this run's is "
            f"{spec.identity_hash()[:12]}): nothing was changed. Give this run another `out` prefix."
        )
    return model


def open_store() -> "Store":
    """Return the object store that the environment names.

    The function imports the S3 library, which takes half a second.
    """
    from rekindle.storage import Store

    return Store.from_env()

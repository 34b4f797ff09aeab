"""Whether a run is complete: `<out>/model.json` is in the object store. Imports no torch."""

import json
from typing import TYPE_CHECKING, Any

from rekindle.errors import ConfigError, NotFound
from rekindle.training.spec import TrainingSpec

if TYPE_CHECKING:
    from rekindle.storage import Store


def completed_model(spec: TrainingSpec) -> dict[str, Any] | None:
    """This run's `model.json` (`sha256`, `step`, ...), if it is in the object store.

    Raises ConfigError if it is another run's.
    """
    store, key = open_store(), f"{spec.out}/model.json"
    try:
        model = json.loads(store.get(key))
        identity = model["identity"]
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{store.uri(key)} is not what a run writes ({error!r}): nothing was changed. Remove it, or give this "
            "run another `out` prefix."
        ) from error
    if identity != spec.identity_hash():
        raise ConfigError(
            f"{store.uri(key)} is the model of another run (identity {str(identity)[:12]}, this run's is "
            f"{spec.identity_hash()[:12]}): nothing was changed. Give this run another `out` prefix."
        )
    return model


def open_store() -> "Store":
    """The object store of the environment; its import takes half a second."""
    from rekindle.storage import Store

    return Store.from_env()

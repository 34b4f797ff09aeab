"""Checks whether a run is complete, that is, whether `<out>/model.json` is in the object store. The
module does not import torch."""

from typing import TYPE_CHECKING, Any

from rekindle.documents import InvalidDocument, ModelFile, read_object
from rekindle.errors import ConfigError, NotFound
from rekindle.names import format_untrusted
from rekindle.training.membership.run_spec import RunSpec

if TYPE_CHECKING:
    from rekindle.storage import Store


def read_completed_model(run_spec: RunSpec) -> dict[str, Any] | None:
    """Return this run's `model.json` (`sha256`, `step`, ...), or None if it is not in the object
    store.

    Raises ConfigError if `model.json` belongs to another run.
    """
    store = open_store()
    model_key = f"{run_spec.out}/model.json"

    try:
        model_record = read_object(ModelFile, store, model_key)
    except NotFound:
        return None
    except InvalidDocument as error:
        raise ConfigError(
            f"{error} Nothing was changed: remove the file, or give this run another `out` prefix."
        ) from error

    model_identity = model_record.identity
    if model_identity != run_spec.identity_hash():
        raise ConfigError(
            f"{store.uri(model_key)} is the model of another run (identity"
            f" {format_untrusted(model_identity[:12])}, this run's is"
            f" {run_spec.identity_hash()[:12]}):"
            " nothing was changed. Give this run another `out` prefix."
        )

    return model_record.as_json()


def open_store() -> "Store":
    """Return the object store that the environment variables configure. The first call imports the
    S3 library, which takes half a second."""
    from rekindle.storage import Store

    return Store.from_env()

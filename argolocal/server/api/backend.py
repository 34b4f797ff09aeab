"""The shared state of the API: the runs, the queue and the stored objects of a home (a directory of
runs)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from argolocal.common import object_names
from argolocal.common.checked_names import RunName
from argolocal.errors import FORM_ERRORS, ArgolocalError, ConfigError, describe
from argolocal.interfaces import Cluster
from argolocal.manifest.types import Object
from argolocal.page.sources import describe_malformed
from argolocal.page.tabs.artifact_source import ObjectReader
from argolocal.runner.run import validate_workflow
from argolocal.server.api.catalogue import Entry, ItemTexts, RunCatalogue
from argolocal.server.api.errors import (
    ALREADY_EXISTS,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    ApiError,
    log,
    missing_namespace,
    missing_object,
)
from argolocal.server.objects import Objects
from argolocal.server.queue import Queue
from argolocal.state.journal import Busy, RunExists, RunFiles

# another name of the newest run
LATEST = "@latest"
NAMESPACE = "argo"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Backend:
    """The runs, the queue and the stored objects of a home (a directory of runs). `namespace`: the
    only namespace that the API has. `open_store`: function that returns the object store for the
    field `s3` of an artifact."""

    cluster: Cluster
    queue: Queue
    objects: Objects
    run_catalogue: RunCatalogue
    open_store: Callable[[Mapping[str, Any]], ObjectReader]
    namespace: str = NAMESPACE

    @cached_property
    def item_texts(self) -> ItemTexts:
        """The JSON texts of runs for lists of workflows."""
        return ItemTexts(self.run_catalogue)

    def has_namespace(self, namespace: str) -> bool:
        """Return True if a list of objects in a namespace includes the objects of this home; ""
        means all namespaces."""
        return namespace in ("", self.namespace)

    def require_namespace(self, namespace: str) -> None:
        """Raise ApiError for a namespace that does not exist."""
        if namespace != self.namespace:
            raise missing_namespace(namespace)

    def find_entry(self, namespace: str, name: str, uid: str = "") -> Entry:
        """Return a run by its name or its uid; the name "@latest" stands for the newest run. Raises
        ApiError."""
        if not self.has_namespace(namespace):
            raise missing_object("workflows", name)
        if name == LATEST:
            return self._find_latest()

        entry = self.run_catalogue.refresh_run(name)
        if entry is None and uid:
            self.run_catalogue.refresh()
            entry = self.run_catalogue.find_uid(uid)
        if entry is None:
            raise missing_object("workflows", name)
        return entry

    def workflow(self, entry: Entry) -> Object:
        """Return the Workflow object of a run. Raises ApiError, also if the files of the run are
        damaged."""
        try:
            return self.run_catalogue.workflow(entry)
        except FORM_ERRORS as error:
            # the cause of the error may also be a bug of this program
            log.error("%s could not be shown", entry.name, exc_info=error)
            raise ApiError(INTERNAL, describe_malformed(entry.name, error)) from error
        except (ArgolocalError, OSError) as error:
            raise ApiError(INTERNAL, describe(error)) from error

    def read_again(self, name: str) -> Object:
        """Return the Workflow object of a run that has just changed. Raises ApiError."""
        return self.workflow(self.find_entry(self.namespace, name))

    def files(self, entry: Entry) -> RunFiles:
        """Return the files of a run."""
        return RunFiles(self.cluster.home, entry.name)

    def validate(self, manifest: Mapping[str, Any]) -> Object:
        """Return the workflow that would run for a manifest. Raises ApiError if the workflow cannot
        run."""
        check_metadata(manifest)
        return refuse_invalid(lambda: validate_workflow(manifest, {}, self.cluster))

    def submit(self, manifest: Mapping[str, Any]) -> Object:
        """Queue a run, and return its Workflow object. Raises ApiError."""
        check_metadata(manifest)
        name = refuse_invalid(lambda: self.queue.submit(manifest))
        return self.read_again(name)

    def _find_latest(self) -> Entry:
        self.run_catalogue.refresh()
        entries = self.run_catalogue.list()
        if not entries:
            raise ApiError(NOT_FOUND, "no workflows found")
        latest, _ = max(entries, key=lambda item: (item[1].created, item[0].resource_version))
        return latest


def refuse_invalid(call: Callable[[], Result]) -> Result:
    """Return the result of a call, and convert its errors to errors of the API. Raises ApiError."""
    try:
        return call()
    except RunExists as error:
        raise ApiError(ALREADY_EXISTS, str(error)) from error
    except ConfigError as error:
        raise ApiError(INVALID_ARGUMENT, str(error)) from error
    except Busy as error:
        raise ApiError(ALREADY_EXISTS, str(error)) from error


def check_metadata(manifest: Mapping[str, Any]) -> None:
    """Raise ApiError for labels or annotations that the Kubernetes API rejects."""
    metadata = manifest["metadata"]

    def check() -> None:
        object_names.check_labels(metadata.get("labels"), "metadata.labels")
        object_names.check_annotations(metadata.get("annotations"), "metadata.annotations")

    refuse_invalid(check)


def require_new_name(backend: Backend, name: object) -> None:
    """Raise ApiError if a run with this name exists, as the Kubernetes API does."""
    run_name = RunName.parse_or_none(name)
    if run_name and backend.run_catalogue.refresh_run(run_name):
        raise ApiError(ALREADY_EXISTS, f'workflows.argoproj.io "{run_name}" already exists')

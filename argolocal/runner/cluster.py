"""The local cluster in which workflows run. The local cluster provides ConfigMaps, Secrets, images,
addresses and an object store.

    cluster = LocalCluster(Path(".argolocal"))
    cluster.configmap("settings")["REGION"]

All state of the local cluster is in the home, a directory with `objects/<Kind>/<name>.json`,
`deployments/` and `store/<bucket>/`. An optional file `images.yaml` in the home maps images to
local commands: `alpine/git:v2: {command: [git], env: {A: b}}`.
"""

import base64
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argolocal.common import homes, object_names, program
from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.common.processes import mentions_home
from argolocal.errors import ConfigError, InvalidDocument
from argolocal.manifest.allowed_values import VERSIONED_KINDS
from argolocal.pods.container_images import BASE_IMAGES, IMAGES_FILE_NAME, Image, image_base_name
from argolocal.state.journal import STRUCTURE_ERRORS, Busy, RunFiles
from argolocal.state.machine_resources import MachineResources, count_gpus, find_memory
from argolocal.state.stored_objects import StoredObjects
from argolocal.store import FolderStore, ObjectStore

if TYPE_CHECKING:
    from argolocal.controllers.controller_kinds import Kinds
    from argolocal.controllers.deployment import Deployments

STORABLE_KINDS = (
    "WorkflowTemplate",
    "ClusterWorkflowTemplate",
    "ConfigMap",
    "Secret",
    "PersistentVolumeClaim",
)
# number of pods whose addresses are reserved; the addresses of older pods may be assigned again
MAX_ADDRESSES = 1000


class LocalCluster:
    """The cluster whose state is in `home` (default: the directory that commands use, see
    require_home).

    `images`: image name → local command (default: images.yaml). `kinds`: the kinds of objects that
    can be applied. `store`: function that returns the object store for the field `s3` of an
    artifact (default: a folder in the directory of all runs for each bucket).
    """

    # default bucket for artifacts that do not specify a bucket
    bucket = "argolocal"
    # names of modules that containers of any image may run with `python -m MODULE`
    modules: tuple[str, ...] = ()

    def __init__(
        self,
        home: Path | None = None,
        images: Mapping[str, Image] | None = None,
        kinds: "Kinds | None" = None,
        store: Callable[[Mapping[str, Any]], ObjectStore] | None = None,
    ) -> None:
        self.home = (home or homes.require_home()).resolve()
        self.images = Image.read_table(self.home / IMAGES_FILE_NAME) if images is None else images
        self._kinds = kinds
        self._stores = store
        self._polled_at = 0.0

    @property
    def path(self) -> str:
        """The import path of the pods: folders with Python modules, separated by colons as in
        PYTHONPATH. Pods see the folders of the import path at the same paths."""
        return os.environ.get(program.environment_variable("PATH"), "")

    @cached_property
    def kinds(self) -> "Kinds":
        """The kinds of objects that can be applied. The module with the controllers is imported
        only on first use, because the import takes time."""
        from argolocal.controllers.controller_kinds import Kinds

        return self._kinds or Kinds()

    def poll(self) -> None:
        """Restart supervisors (processes that run Deployments and services) that have died. A call
        within one second after a check does nothing."""
        if time.monotonic() - self._polled_at > 1:
            self._polled_at = time.monotonic()
            self.keep_running()

    def keep_running(self) -> None:
        """Restart supervisors that have died."""
        # import the controller only if it is needed, because the import takes 30 ms
        if (self.home / "objects/Deployment").exists():
            self.revive()

    def built_in(self) -> Mapping[tuple[str, str], Callable[[], Mapping[str, str]]]:
        """Return the ConfigMaps and Secrets whose data are computed instead of stored: (kind, name)
        → function that returns the data."""
        return {}

    def configmap(self, name: str) -> dict[str, str]:
        """Return the data of a ConfigMap, without its binaryData, which only volumes use. Raises
        KeyError if the ConfigMap does not exist."""
        binary_data = (self.find("ConfigMap", name) or {}).get("binaryData") or {}
        object_data = _require_texts(self.files("ConfigMap", name), name)
        return {
            data_key: value
            for data_key, value in object_data.items()
            if data_key not in binary_data
        }

    def secret(self, name: str) -> dict[str, str]:
        """Return the data of a Secret. Raises KeyError if the Secret does not exist."""
        return _require_texts(self.files("Secret", name), name)

    def files(self, kind: str, name: str) -> dict[str, bytes] | None:
        """Return the files that a volume with this ConfigMap or Secret contains, by name. Return
        None if the ConfigMap or Secret does not exist."""
        file_contents = {}
        kubernetes_object = self.find(kind, name)

        read_built_in = self.built_in().get((kind, name))
        if read_built_in:
            file_contents = {
                data_key: value.encode(errors="surrogateescape")
                for data_key, value in read_built_in().items()
            }
        elif kubernetes_object is None:
            return None

        if kind == "Secret":
            base64_field = "data"
            text_field = "stringData"
        else:
            base64_field = "binaryData"
            text_field = "data"

        fields = kubernetes_object or {}
        for data_key, value in (fields.get(base64_field) or {}).items():
            file_contents[data_key] = base64.b64decode(value)
        for data_key, value in (fields.get(text_field) or {}).items():
            file_contents[data_key] = value.encode()

        return file_contents

    def image(self, image_name: str) -> Image:
        """Return the local command and environment of an image."""
        return self.images.get(image_name) or Image(
            args=BASE_IMAGES.get(image_base_name(image_name), ())
        )

    def store(self, s3_location: Mapping[str, Any] | None = None) -> ObjectStore:
        """Return the object store for an artifact with the location `s3_location`; {} means the
        default location. Raises ConfigError for an invalid location, and KeyError for a missing
        Secret with its credentials."""
        if self._stores:
            return self._stores(s3_location or {})
        bucket_name = (s3_location or {}).get("bucket") or self.bucket
        object_names.BUCKET_NAME_RULE.check(bucket_name, "the bucket of an artifact")
        store_folder = self.home / "store"
        (store_folder / self.bucket).mkdir(parents=True, exist_ok=True)
        return FolderStore(store_folder, bucket_name)

    def address(self, pod_name: str) -> str:
        """Return the loopback address of a pod. Later calls for this pod return the same address,
        and no other pod of a run in the same home directory gets this address."""
        homes.create_home(self.home)

        addresses_file = self.home / "addresses.json"
        with open(addresses_file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            pod_of_address: dict[str, str] = (
                read_object(addresses_file) if addresses_file.exists() else {}
            )
            digests = (
                hashlib.sha256(f"{self.home}/{pod_name}/{attempt_number}".encode()).digest()
                for attempt_number in count()
            )
            candidate_addresses = (
                f"127.{1 + second_byte % 254}.{third_byte}.{1 + fourth_byte % 254}"
                for second_byte, third_byte, fourth_byte, *_ in digests
            )

            address = next(
                candidate_address
                for candidate_address in candidate_addresses
                if pod_of_address.setdefault(candidate_address, pod_name) == pod_name
            )

            write_atomically(
                addresses_file, to_json(dict(list(pod_of_address.items())[-MAX_ADDRESSES:]))
            )

        return address

    def service_variables(self) -> dict[str, str]:
        """Return the environment variables for Services that a kubelet sets in every pod.

        NAME_SERVICE_HOST is the address of the supervisor, which forwards connections to the pods.
        For a headless Service, NAME_SERVICE_ENDPOINTS contains the addresses of its pods, because
        there are no DNS records here.
        """
        variables_by_name = {}

        for service_file in sorted((self.home / "objects/Service").glob("*.json")):
            service = read_object(service_file)
            service_name = service["metadata"]["name"]
            variable_prefix = service_name.upper().replace("-", "_")
            port_text = str(service["spec"]["ports"][0]["port"])

            if service["spec"].get("clusterIP") == "None":
                host = self.address(f"service/{service_name}")
            else:
                host = "127.0.0.1"

            variables_by_name[f"{variable_prefix}_SERVICE_HOST"] = host
            variables_by_name[f"{variable_prefix}_SERVICE_PORT"] = port_text
            if service["spec"].get("clusterIP") == "None":
                variables_by_name[f"{variable_prefix}_SERVICE_ENDPOINTS"] = ",".join(
                    self._endpoints(service["spec"]["selector"])
                )

        return variables_by_name

    def _endpoints(self, selector: Mapping[str, str]) -> list[str]:
        """Return the addresses of the Deployments' pods that a Service with this `selector`
        selects."""
        addresses = []
        for deployment_file in sorted((self.home / "objects/Deployment").glob("*.json")):
            labels = read_object(deployment_file)["spec"]["template"]["metadata"]["labels"]
            pod_folders = (self.home / "deployments" / deployment_file.stem / "pods").glob("*")
            addresses += [
                self.address(pod_folder.name)
                for pod_folder in pod_folders
                if selector.items() <= labels.items()
            ]
        return addresses

    @cached_property
    def resources(self) -> MachineResources:
        """The GPUs and the memory that runs share."""
        return MachineResources(self.home, count_gpus(), find_memory())

    @cached_property
    def deployments(self) -> "Deployments":
        """The controller of the Deployments, imported on first use."""
        from argolocal.controllers.deployment import Deployments

        return Deployments(self)

    def revive(self) -> bool:
        """Restart the supervisor of the Deployments if it has died. Return True if the supervisor
        had died."""
        return self.deployments.revive()

    def down(self) -> list[str]:
        """Stop the Deployments, wait until they have ended, and return their names. Raises Busy
        while a run is in progress."""
        from argolocal.controllers.memory_volumes import clean_up_shared_memory

        run_names = [run_files.name for run_files in RunFiles.all(self.home) if run_files.runner()]
        if run_names:
            raise Busy(
                f"{', '.join(run_names)} must end before `{program.name} down` stops the"
                f" deployments and services. Wait, or run `{program.name} stop {run_names[0]}`"
                " first."
            )

        clean_up_shared_memory()
        return [f"deployment {deployment_name}" for deployment_name in self.deployments.down()]

    def overview(self) -> list[dict[str, Any]]:
        """Return a dict for each Deployment, see `Deployments.overview`. If the supervisor of the
        Deployments has died, restart it first."""
        self.revive()
        return self.deployments.overview()

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return a stored object, or None if it does not exist."""
        if not object_names.find_name_rule(kind).allows(name):
            return None
        object_file = self.home / "objects" / kind / f"{name}.json"
        if object_file.exists():
            return read_object(object_file)
        return None

    def has(self, kind: str, name: str, key: str | None = None) -> bool:
        """Return True if the object exists and contains `key`. Without `key`, return True if the
        object exists."""
        is_built_in = (kind, name) in self.built_in()
        kubernetes_object = {} if is_built_in else self.find(kind, name)
        data_keys = {
            data_key
            for data_field in ("data", "binaryData", "stringData")
            for data_key in (kubernetes_object or {}).get(data_field) or {}
        }
        return kubernetes_object is not None and (key is None or key in data_keys or is_built_in)

    def store_objects(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Store the objects that accompany a Workflow in its file, as `kubectl apply` would. Raises
        ConfigError."""
        for kubernetes_object in objects:
            check_storable(kubernetes_object)
            kind = kubernetes_object["kind"]
            name = kubernetes_object["metadata"]["name"]
            if kind in VERSIONED_KINDS:
                StoredObjects(self.home).apply(kubernetes_object)
                continue

            object_file = self.home / "objects" / str(kind) / f"{name}.json"
            homes.create_home(self.home)
            object_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(object_file, to_json(kubernetes_object), 0o600)


def check_storable(kubernetes_object: Mapping[str, Any]) -> None:
    """Raise ConfigError for an object that `store_objects` cannot store."""
    kind = kubernetes_object.get("kind")
    name = (kubernetes_object.get("metadata") or {}).get("name")
    if kind not in STORABLE_KINDS:
        raise ConfigError(
            f"{kind} {name!r} in the Workflow's file is not supported: use one of"
            f" {', '.join(STORABLE_KINDS)}."
        )

    object_names.check_object_name(kind, name)
    if kind in object_names.DATA_KINDS:
        object_names.check_data(kubernetes_object, str(kind), str(name))


def trust(home: Path) -> None:
    """Trust a home (a directory of runs) that this user did not create at this path, for example
    because it was moved or copied. In a copy of a home, also delete the records of processes, which
    belong to the original home.

    Raises ConfigError for a home (directory of all runs) that does not exist or belongs to another
    user.
    """
    if not home.is_dir():
        raise ConfigError(f"{home} is not a directory: pass the home that you moved or copied.")

    homes.trust_home(home)
    for record_file in (*home.glob("services/*.json"), home / "deployments/supervisor.json"):
        # a file that is not a valid record is ignored
        with suppress(OSError, InvalidDocument, *STRUCTURE_ERRORS):
            if not mentions_home(read_object(record_file)["pid"], home.resolve()):
                record_file.unlink()


def _require_texts(object_data: Mapping[str, bytes] | None, config_map_name: str) -> dict[str, str]:
    if object_data is None:
        raise KeyError(config_map_name)
    return {
        data_key: value.decode(errors="surrogateescape") for data_key, value in object_data.items()
    }

"""Check that this machine has everything that Rekindle needs. Each failed check has a remedy.

    for check in check_machine(Path(".rekindle")):
        print(check)

The checks write to the object store, query MLflow and bind addresses. The checks stop the services
that they have started. If S3_ENDPOINT_URL or MLFLOW_TRACKING_URI is set, the service at this
address is tested instead of the embedded service.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from argolocal.common import homes
from argolocal.pods import filesystem
from rekindle.errors import Check, ConfigError, RekindleError, format_address
from rekindle.kubernetes_names import CONFIG_MAP, MLFLOW_TRACKING_URI
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import ADDRESS_VARIABLES, SERVICE_NAMES, is_answering

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MIN_PYTHON = (3, 11)
GIB = 1 << 30
# minimum free bytes: disk, memory, shared memory
MIN_DISK_BYTES = 5 * GIB
MIN_MEMORY_BYTES = 3 * GIB
# minimum free shared memory, which is enough for the snapshots of a small model
MIN_SHARED_MEMORY_BYTES = 1 * GIB
# minimum number of files that a process must be allowed to open
MIN_OPEN_FILES = 1024


def check_machine(home: Path) -> list[Check]:
    """Run all checks of this machine in order. The checks of the services take several seconds."""
    machine_checks: list[Callable[[Path], Check]] = [
        check_python,
        check_packages,
        check_system,
        check_home,
        check_disk,
        check_memory,
        check_shared_memory,
        check_open_files,
        check_clock,
    ]

    check_results = [run_check(home) for run_check in machine_checks]

    check_results += [
        check_can_bind("ports", "127.0.0.1", "Is the loopback interface up?"),
        # each pod on this machine gets its own address in 127.0.0.0/8
        check_can_bind("pod addresses", "127.77.77.77", "All of 127.0.0.0/8 must be on lo: ip a"),
        check_namespaces(),
    ]

    if not all(check_result.ok for check_result in check_results if check_result.required):
        skip_reason = "not checked: fix the failures above first"
        return [
            *check_results,
            Check("object store", False, skip_reason),
            Check("MLflow", False, skip_reason),
        ]

    cluster = LocalCluster(home)
    service_records = [cluster.services.find(name) for name in SERVICE_NAMES]
    was_running = any(record and record.alive for record in service_records)
    try:
        return [*check_results, check_store(cluster), check_mlflow(cluster)]
    finally:
        if not was_running:
            cluster.services.down()


def check_python(_: Path) -> Check:
    is_supported = sys.version_info >= MIN_PYTHON
    return Check(
        "Python",
        is_supported,
        platform.python_version(),
        "Python 3.11 or newer is needed: make PYTHON=python3.11 run",
    )


def check_packages(_: Path) -> Check:
    """Check the packages of `rekindle[all]` by the metadata of the packages, because importing them
    would take seconds."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires("rekindle") or []]
    except (ImportError, metadata.PackageNotFoundError) as error:
        return Check("packages", False, f"{error}", "Install Rekindle: make install")

    extra_groups = [
        requirement.extras
        for requirement in requirements
        if requirement.name == "rekindle" and _is_required_by_extra(requirement, "all")
    ]

    extra_names = {""}.union(*extra_groups)
    third_party = [requirement for requirement in requirements if requirement.name != "rekindle"]
    expected_packages = [
        requirement
        for requirement in third_party
        if any(_is_required_by_extra(requirement, extra_name) for extra_name in extra_names)
    ]
    package_problems = []

    for requirement in expected_packages:
        try:
            installed_version = metadata.version(requirement.name)
            if not requirement.specifier.contains(installed_version, prereleases=True):
                package_problems.append(
                    f"{requirement.name} {installed_version} (needs {requirement.specifier})"
                )
        except metadata.PackageNotFoundError:
            package_problems.append(f"{requirement.name} is missing")

    detail = (
        ", ".join(sorted(set(package_problems)))
        or f"{len({requirement.name for requirement in expected_packages})} found"
    )

    return Check(
        "packages",
        not package_problems,
        detail,
        "Install the packages: make install, or pip install -e '.[all]'",
    )


def _is_required_by_extra(requirement: "Requirement", extra_name: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra_name})


def check_system(_: Path) -> Check:
    detail = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    remedy = (
        "Rekindle runs pods on Linux (loopback addresses, PR_SET_PDEATHSIG): use a Linux machine or"
        " container."
    )
    return Check("system", sys.platform == "linux", detail, remedy)


def check_home(home: Path) -> Check:
    remedy = f"Make {home} writable, or run rekindle in another directory."
    try:
        homes.require_owned_home(home)
        homes.create_home(home)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"x")
    except OSError as error:
        return Check("home", False, f"{home}: {error.strerror}", remedy)
    except ConfigError as error:
        return Check("home", False, str(error), "Or run rekindle in another directory.")
    return Check("home", True, f"{home.resolve()} can be written")


def check_disk(home: Path) -> Check:
    existing_folder = next(
        (path for path in [home, *home.resolve().parents] if path.exists()), Path("/")
    )
    free_bytes = shutil.disk_usage(existing_folder).free
    remedy = (
        f"Free {MIN_DISK_BYTES // GIB} GiB on the disk (`rekindle down`, then remove old runs from"
        f" {home}/runs)."
    )
    return Check("disk", free_bytes >= MIN_DISK_BYTES, f"{free_bytes / GIB:.1f} GiB free", remedy)


def check_memory(_: Path) -> Check:
    memory_fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(memory_fields["MemAvailable"].split()[0]) * 1024
    remedy = (
        f"Close programs until {MIN_MEMORY_BYTES // GIB} GiB are free, or lower train.workers"
        " (--set train.workers=1)."
    )

    return Check(
        "memory",
        free_bytes >= MIN_MEMORY_BYTES,
        f"{free_bytes / GIB:.1f} GiB available",
        remedy,
        required=False,
    )


def check_shared_memory(_: Path) -> Check:
    """Check the free shared memory, where each worker stores its three newest snapshots."""
    from rekindle.training.checkpoint import snapshot_file

    snapshot_directory = snapshot_file.find_snapshot_directory()
    free_bytes = shutil.disk_usage(snapshot_directory).free if snapshot_directory.exists() else 0
    detail = f"{free_bytes / GIB:.1f} GiB free in {snapshot_directory}"
    remedy = (
        "Without this memory, a run that loses all its processes resumes from an older step in the"
        f" object store. Enlarge {snapshot_directory}: mount -o"
        f" remount,size={2 * MIN_SHARED_MEMORY_BYTES // GIB}G {snapshot_directory}; in Docker:"
        f" docker run --shm-size={2 * MIN_SHARED_MEMORY_BYTES // GIB}g"
    )
    return Check(
        "shared memory", free_bytes >= MIN_SHARED_MEMORY_BYTES, detail, remedy, required=False
    )


def check_open_files(_: Path) -> Check:
    max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Check(
        "open files",
        max_open_files >= MIN_OPEN_FILES,
        f"{max_open_files} allowed",
        f"Raise the limit: ulimit -n {MIN_OPEN_FILES}",
    )


def check_clock(_: Path) -> Check:
    """Check that the clock is not earlier than the installation of Rekindle, because signatures and
    certificates need the correct time."""
    seconds_behind = Path(__file__).stat().st_mtime - time.time()
    detail = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Check(
        "clock",
        seconds_behind < 60,
        detail,
        "The time is before the installation of Rekindle: set the clock.",
    )


def check_can_bind(check_name: str, address: str, remedy: str) -> Check:
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        return Check(check_name, False, f"{address}: {error.strerror}", remedy)
    return Check(check_name, True, f"{address} can be bound")


def check_namespaces() -> Check:
    remedy = (
        "Without mount namespaces, pods share this machine's files, and manifests with literal"
        " paths are refused. See sysctl user.max_user_namespaces"
    )
    if filesystem.supports_namespaces():
        detail = "each pod has its own file system view"
    else:
        detail = "unshare is not permitted"
    return Check(
        "mount namespaces", filesystem.supports_namespaces(), detail, remedy, required=False
    )


def check_store(cluster: LocalCluster) -> Check:
    from rekindle.doctor import probe

    remedy = (
        "Use a store that honours If-None-Match and If-Match (MinIO, S3), or unset S3_ENDPOINT_URL."
    )
    try:
        return Check("object store", *probe.check_store(cluster.store()), remedy)
    except RekindleError as error:
        return Check("object store", False, str(error), remedy)


def check_mlflow(cluster: LocalCluster) -> Check:
    mlflow_log = cluster.services.folder / "mlflow.log"
    if os.environ.get(ADDRESS_VARIABLES["mlflow"]):
        remedy = f"Correct or unset {ADDRESS_VARIABLES['mlflow']}."
    else:
        remedy = f"See {mlflow_log}, then try again."

    try:
        cluster.ready()
        url = cluster.configmap(CONFIG_MAP)[MLFLOW_TRACKING_URI]
    except RekindleError as error:
        return Check("MLflow", False, str(error), remedy)

    is_reachable = not url.startswith("http") or is_answering(f"{url}/version", 10)
    return Check(
        "MLflow",
        is_reachable,
        format_address(url) + (" answers" if is_reachable else " does not answer"),
        remedy,
    )

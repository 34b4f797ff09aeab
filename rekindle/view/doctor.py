"""Is everything here that Rekindle needs on this machine, and does it work? Each failure comes with its remedy.

    for check in check(Path(".rekindle")): print(check)

Nothing is assumed: the object store is written to, MLflow is asked, addresses are bound. Services that this starts are
stopped again. S3_ENDPOINT_URL and MLFLOW_TRACKING_URI are respected: then it is the real ones that are examined.
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

from rekindle.errors import Check, RekindleError, without_user
from rekindle.local.emulator import LocalCluster
from rekindle.local.services.services import REAL, SERVICES, answers

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PYTHON = (3, 11)
GIB = 1 << 30
DISK, MEMORY = 5 * GIB, 3 * GIB  # bytes that must be free
SHARED = 1 * GIB  # bytes of shared memory that make room for the states of a small model's workers
FILES = 1024  # open files a process must be allowed


def check(home: Path) -> list[Check]:
    """Every check, in order. Those of the services need seconds."""
    machine: list[Callable[[Path], Check]] = [python, packages, system, folder, disk, memory, shared, files, clock]
    network: list[Callable[[Path], Check]] = [ports, loopback, namespaces]
    found = [one(home) for one in [*machine, *network]]
    if not all(each.ok for each in found if each.required):
        skipped = "not examined: mend what is above first"
        return [*found, Check("object store", False, skipped), Check("MLflow", False, skipped)]
    cluster = LocalCluster(home)
    running = [name for name in SERVICES if (record := cluster.services.find(name)) and record.alive]
    try:
        return [*found, store(cluster), mlflow(cluster)]
    finally:
        if not running:
            cluster.services.down()


def python(_: Path) -> Check:
    ok = sys.version_info >= PYTHON
    return Check("Python", ok, platform.python_version(), "Rekindle needs 3.11 or newer: make PYTHON=python3.11 run")


def packages(_: Path) -> Check:
    """Every package that `rekindle[all]` names, by its metadata: importing them takes seconds."""
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(each) for each in metadata.requires("rekindle") or []]
    except (ImportError, metadata.PackageNotFoundError) as error:
        return Check("packages", False, f"{error}", "Install: make install")
    extras = {""}.union(*(each.extras for each in needed if each.name == "rekindle" and _of(each, "all")))
    wanted = [each for each in needed if each.name != "rekindle" and any(_of(each, extra) for extra in extras)]
    wrong = []
    for each in wanted:
        try:
            version = metadata.version(each.name)
            if not each.specifier.contains(version, prereleases=True):
                wrong.append(f"{each.name} {version} (needs {each.specifier})")
        except metadata.PackageNotFoundError:
            wrong.append(f"{each.name} is missing")
    found = ", ".join(sorted(set(wrong))) or f"{len({each.name for each in wanted})} found"
    return Check("packages", not wrong, found, "Install them: make install, or pip install -e '.[all]'")


def _of(needed: "Requirement", extra: str) -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": extra})


def system(_: Path) -> Check:
    found = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores"
    remedy = "Rekindle runs pods on Linux (loopback addresses, PR_SET_PDEATHSIG): use a Linux machine or container."
    return Check("system", sys.platform == "linux", found, remedy)


def folder(home: Path) -> Check:
    remedy = f"Make {home} writable, or run rekindle in another directory."
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"x")
    except OSError as error:
        return Check("home", False, f"{home}: {error.strerror}", remedy)
    return Check("home", True, f"{home.resolve()} can be written")


def disk(home: Path) -> Check:
    there = next((each for each in [home, *home.resolve().parents] if each.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    remedy = f"Free {DISK // GIB} GiB on that disk (`rekindle down`, then remove old runs from {home}/runs)."
    return Check("disk", free >= DISK, f"{free / GIB:.1f} GiB free", remedy)


def memory(_: Path) -> Check:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    remedy = f"Close programs until {MEMORY // GIB} GiB are free, or lower train.workers (--set train.workers=1)."
    return Check("memory", free >= MEMORY, f"{free / GIB:.1f} GiB available", remedy, required=False)


def shared(_: Path) -> Check:
    """Workers keep their newest states there, three of each."""
    from rekindle.training.checkpoint import snapshot_file

    try:
        free = shutil.disk_usage(snapshot_file.directory()).free
    except OSError as error:
        free, found = 0, f"{snapshot_file.directory()}: {error.strerror}"
    else:
        found = f"{free / GIB:.1f} GiB free in {snapshot_file.directory()}"
    remedy = (
        "Without room a run that loses all its processes goes on from the object store, some steps back. Make it "
        f"larger: mount -o remount,size={2 * SHARED // GIB}G {snapshot_file.directory()}, in Docker: docker run "
        f"--shm-size={2 * SHARED // GIB}g"
    )
    return Check("shared memory", free >= SHARED, found, remedy, required=False)


def files(_: Path) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Check("open files", limit >= FILES, f"{limit} allowed", f"Raise the limit: ulimit -n {FILES}")


def clock(_: Path) -> Check:
    """A clock behind our own files breaks signatures, certificates and every comparison of times."""
    behind = Path(__file__).stat().st_mtime - time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Check("clock", behind < 60, found, "It is behind the time at which Rekindle was installed: set the clock.")


def ports(_: Path) -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as one:
            return Check("ports", True, f"a free one on 127.0.0.1, such as {one.getsockname()[1]}")
    except OSError as error:
        return Check("ports", False, str(error), "No port on 127.0.0.1 can be bound: is the loopback interface up?")


def loopback(_: Path) -> Check:
    """Every pod has an address of its own."""
    address = "127.77.77.77"
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        return Check("pod addresses", False, f"{address}: {error.strerror}", "All of 127.0.0.0/8 must be on lo: ip a")
    return Check("pod addresses", True, f"{address} can be bound")


def namespaces(_: Path) -> Check:
    from rekindle.local.pods import filesystem

    remedy = (
        "Pods share this machine's files; manifests with literal paths are refused. See sysctl user.max_user_namespaces"
    )
    found = "each pod has files of its own" if filesystem.available() else "unshare is not permitted"
    return Check("mount namespaces", filesystem.available(), found, remedy, required=False)


def store(cluster: LocalCluster) -> Check:
    from rekindle.view import probe

    remedy = "Use a store that honours If-None-Match and If-Match (MinIO, S3), or unset S3_ENDPOINT_URL."
    try:
        return Check("object store", *probe.store(cluster.store()), remedy)
    except RekindleError as error:
        return Check("object store", False, str(error), remedy)


def mlflow(cluster: LocalCluster) -> Check:
    log = cluster.services.folder / "mlflow.log"
    remedy = f"Correct or unset {REAL['mlflow']}." if os.environ.get(REAL["mlflow"]) else f"See {log}; then try again."
    try:
        cluster.ready()
        url = cluster.configmap("rekindle")["MLFLOW_TRACKING_URI"]
    except RekindleError as error:
        return Check("MLflow", False, str(error), remedy)
    ok = not url.startswith("http") or answers(f"{url}/version", 10)
    return Check("MLflow", ok, without_user(url) + (" answers" if ok else " does not answer"), remedy)

"""What every container needs before a cluster should run it, whether in a template or in an object that is applied.

One finding a container and rule: images that move, resources nobody asked for, what PodSecurity `restricted` refuses,
secrets, and shell syntax that no shell reads.
"""

import re
from collections.abc import Iterable, Iterator

from pipelines.lint.findings import Findings
from pipelines.lint.tags import UNKNOWN
from pipelines.scopes import Data

DIGEST = re.compile(r".*@sha256:[0-9a-f]{64}")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
CALL = re.compile(r"(?<!\$)\$\(([^()]+)\)")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET = re.compile(r".*(PASSWORD|PASSWD|SECRET|TOKEN|ACCESS_KEY|API_KEY|CREDENTIALS?)")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}

Containers = Iterable[tuple[str, Data]]


def named(path: str, pod: Data, *lists: str) -> Iterator[tuple[str, Data]]:
    """The containers in `lists` of a pod, each with its path."""
    for key in lists or ("initContainers", "containers"):
        for number, each in enumerate(pod.get(key) or []):
            yield f"{path}.{key}[{each.get('name', number)}]", each


def check(found: Findings, path: str, pod: Data, containers: Containers) -> None:
    """`pod` is a PodSpec, or as much of it as a template has."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key) is True:
            found.warn(f"{path}.{key}", "security", "PodSecurity restricted refuses it: take it out.")
    for volume in pod.get("volumes") or []:
        if len(kinds := volume.keys() - {"name"}) == 1 and not kinds <= VOLUMES:
            why = f"PodSecurity restricted refuses a {kinds.pop()}: use a persistentVolumeClaim, or the object store."
            found.warn(f"{path}.volumes[{volume.get('name')}]", "security", why)
    for where, container in containers:
        name = container.get("name")
        if name and UNKNOWN not in name and (not LABEL.fullmatch(name) or len(name) > 63):
            found.add(where, "name", f'"{name}" must be lower-case letters, digits and dashes, at most 63 of them.')
        for port in container.get("ports") or []:
            if len(str(port.get("name", ""))) > 15:
                found.add(f"{where}.ports", "name", f'"{port["name"]}" must have at most 15 characters.')
        _image(found, f"{where}.image", str(container.get("image") or ""))
        _resources(found, f"{where}.resources", container.get("resources") or {})
        _security(found, f"{where}.securityContext", pod.get("securityContext") or {}, container)
        _secrets(found, f"{where}.env", container.get("env") or [])
        _calls(found, where, container)


def probes(found: Findings, containers: Containers) -> None:
    """A server that nobody asks whether it is ready gets requests while it starts."""
    for where, container in containers:
        if missing := [key for key in ("readinessProbe", "livenessProbe") if key not in container]:
            why = "it gets requests before it can answer, and a hung one is never replaced"
            found.warn(where, "probe", f"it has no {' and no '.join(missing)}: {why}. Give it both.")


def _image(found: Findings, path: str, image: str) -> None:
    if not image or "{{" in image or UNKNOWN in image or DIGEST.fullmatch(image):
        return
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if "@" in image:
        why = "names no digest: it must end with @sha256: and 64 hexadecimal digits."
    elif tag in ("", "latest"):
        why = f"is whatever was pushed last{'' if tag else ', as it has no tag'}: pin it by digest (NAME@sha256:...)."
    else:
        why = f'can change, as the tag "{tag}" can be pushed again: pin it by digest (NAME@sha256:...).'
    found.image(path, image, why)


def _resources(found: Findings, path: str, resources: Data) -> None:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    missing = [f"requests.{key}" for key in ("cpu", "memory") if key not in requests and key not in limits]
    missing += ["limits.memory"] if "memory" not in limits else []
    if missing:
        why = "the scheduler cannot place it, and it may take its neighbours' memory"
        found.warn(path, "resources", f"it has no {', no '.join(missing)}: {why}. Give them.")


def _security(found: Findings, path: str, pod: Data, container: Data) -> None:
    own = container.get("securityContext") or {}
    both = {**pod, **own}
    seccomp, capabilities = both.get("seccompProfile") or {}, own.get("capabilities") or {}
    added = set(map(str, capabilities.get("add") or [])) - {"NET_BIND_SERVICE"}
    wanted = {
        "runAsNonRoot: true": both.get("runAsNonRoot") in (True, UNKNOWN),
        "a runAsUser that is not 0": both.get("runAsUser") != 0,
        "seccompProfile: {type: RuntimeDefault}": seccomp.get("type") in ("RuntimeDefault", "Localhost"),
        "allowPrivilegeEscalation: false": own.get("allowPrivilegeEscalation") in (False, UNKNOWN),
        "capabilities: {drop: [ALL]}": "ALL" in (capabilities.get("drop") or []) and not added,
        "privileged: false": not own.get("privileged"),
    }
    if missing := [name for name, there in wanted.items() if not there]:
        found.warn(path, "security", f"PodSecurity restricted refuses it: it needs {', '.join(missing)}.")


def _secrets(found: Findings, path: str, env: list[Data]) -> None:
    for each in env:
        name, value = str(each.get("name", "")), each.get("value")
        if value and SECRET.fullmatch(name) and not any(mark in str(value) for mark in ("{{", UNKNOWN, "$(")):
            why = "whoever reads the manifest reads it. Take it from a Secret (valueFrom.secretKeyRef)."
            found.warn(f"{path}[{name}]", "secret", why)


def _calls(found: Findings, path: str, container: Data) -> None:
    """`$(date)` is for a shell; Kubernetes fills in `$(VARIABLE)` only and passes the rest on as it is."""
    command = [str(each) for each in container.get("command") or []]
    if "source" in container or (command and command[0].rpartition("/")[2] in SHELLS):
        return
    known = {str(each.get("name")) for each in container.get("env") or []}
    for key in ("command", "args"):
        for text in container.get(key) or []:
            for inside in CALL.findall(str(text)):
                if inside not in known and not VARIABLE.fullmatch(inside):
                    found.warn(f"{path}.{key}", "shell", call(inside))


def call(inside: str) -> str:
    """Why `$(inside)` is not what it seems, and what to write."""
    way = "Run it by `sh -c`, or use a tag of the workflow's, such as {{workflow.creationTimestamp.Y}}"
    return f"$({inside}) stays as it is, for no shell reads it. {way}."

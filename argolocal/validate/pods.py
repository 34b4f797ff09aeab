"""Rules for containers, in templates and in applied objects.

One finding per container and rule: unpinned images, missing resources, violations of PodSecurity `restricted`,
secrets, and shell syntax without a shell.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from argolocal.manifest.tag_scope import Data
from argolocal.validate.findings import Findings
from argolocal.validate.tag_rules import UNKNOWN

DIGEST = re.compile(r".*@sha256:[0-9a-f]{64}")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
CALL = re.compile(r"(?<!\$)\$\(([^()]+)\)")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
SECRET = re.compile(
    r"(.*(PASSWORD|PASSWD|SECRET|SECRET_KEY|ACCESS_KEY|API_KEY|CREDENTIALS?)|(.*_)?(PASS|TOKEN)|.+_PWD)", re.IGNORECASE
)
VOCABULARY = re.compile(r"(.*_)?(PAD|EOS|BOS|UNK|MASK|SEP|CLS|NEW|MAX|MIN|START|STOP|END|SPECIAL)_TOKEN", re.IGNORECASE)
FLAG = re.compile(r"--([A-Za-z][\w-]{0,100})(?:=|\s+)(\S+)")
LOGIN = re.compile(r"\b([a-z][a-z0-9+.-]{0,30})://[^\s/:@]*:([^\s/@]+)@", re.IGNORECASE)
FILLED = ("{{", UNKNOWN, "$")  # values from elsewhere
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}

Containers = Iterable[tuple[str, Data]]


def named(path: str, pod: Data, *lists: str) -> Iterator[tuple[str, Data]]:
    """Path and container of each container in `lists` of a pod."""
    for key in lists or ("initContainers", "containers"):
        for number, container in enumerate(pod.get(key) or []):
            yield f"{path}.{key}[{container.get('name', number)}]", container


def check(findings: Findings, path: str, pod: Data, containers: Containers, whole: bool = True) -> None:
    """`pod` is a PodSpec or the part of it that a template has; not `whole`: an override of another one."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key) is True:
            findings.warn(f"{path}.{key}", "security", "PodSecurity restricted refuses it: take it out.")
    for volume in pod.get("volumes") or []:
        if len(kinds := volume.keys() - {"name"}) == 1 and not kinds <= VOLUMES:
            why = f"PodSecurity restricted refuses a {kinds.pop()}: use a persistentVolumeClaim, or the object store."
            findings.warn(f"{path}.volumes[{volume.get('name')}]", "security", why)
    for where, container in containers:
        name = container.get("name")
        if name and UNKNOWN not in name and (not LABEL.fullmatch(name) or len(name) > 63):
            findings.add(where, "name", f'"{name}" must be lower-case letters, digits and dashes, at most 63 of them.')
        for port in container.get("ports") or []:
            if len(str(port.get("name", ""))) > 15:
                findings.add(f"{where}.ports", "name", f'"{port["name"]}" must have at most 15 characters.')
        _image(findings, f"{where}.image", str(container.get("image") or ""))
        if whole or "resources" in container:
            resources(findings, f"{where}.resources", container.get("resources") or {})
        if whole:
            _security(findings, f"{where}.securityContext", pod.get("securityContext") or {}, container)
        _secrets(findings, where, container)
        _calls(findings, where, container)


def probes(findings: Findings, containers: Containers) -> None:
    """Without a readiness probe a server gets requests while it starts."""
    for where, container in containers:
        if missing := [key for key in ("readinessProbe", "livenessProbe") if key not in container]:
            why = "it gets requests before it can answer, and a hung one is never replaced"
            findings.warn(where, "probe", f"it has no {' and no '.join(missing)}: {why}. Give it both.")


def _image(findings: Findings, path: str, image: str) -> None:
    if not image or "{{" in image or UNKNOWN in image or DIGEST.fullmatch(image):
        return
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if "@" in image:
        why = "names no digest: it must end with @sha256: and 64 hexadecimal digits."
    elif tag in ("", "latest"):
        why = f"is whatever was pushed last{'' if tag else ', as it has no tag'}: pin it by digest (NAME@sha256:...)."
    else:
        why = f'can change, as the tag "{tag}" can be pushed again: pin it by digest (NAME@sha256:...).'
    findings.image(path, image, why)


def resources(findings: Findings, path: str, given: Data) -> None:
    """Without requests a container is scheduled anywhere, without a limit its memory is unbounded."""
    requests, limits = given.get("requests") or {}, given.get("limits") or {}
    missing = [f"requests.{key}" for key in ("cpu", "memory") if key not in requests and key not in limits]
    missing += ["limits.memory"] if "memory" not in limits else []
    if missing:
        why = "the scheduler cannot place it, and it may take its neighbours' memory"
        findings.warn(path, "resources", f"it has no {', no '.join(missing)}: {why}. Give them.")


def _security(findings: Findings, path: str, pod: Data, container: Data) -> None:
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
        findings.warn(path, "security", f"PodSecurity restricted refuses it: it needs {', '.join(missing)}.")


def _secrets(findings: Findings, path: str, container: Data) -> None:
    """Plain-text passwords: by the names of variables and flags, and in URLs."""
    for variable in container.get("env") or []:
        name, value = str(variable.get("name", "")), str(variable.get("value") or "")
        if _secret(name, value) or _logs_in(value):
            why = "whoever reads the manifest reads it. Take it from a Secret (valueFrom.secretKeyRef)."
            findings.warn(f"{path}.env[{name}]", "secret", why)
    for key in ("command", "args"):
        words = [str(word) for word in container.get(key) or []]
        flags = [flag for text in words for flag in FLAG.findall(text)]
        flags += [(flag[2:], value) for flag, value in pairwise(words) if flag.startswith("--")]
        named = [f"--{name}" for name, value in flags if not value.startswith("-") and _secret(name, value)]
        for what in dict.fromkeys([*named, *(f"{scheme}://" for text in words if (scheme := _logs_in(text)))]):
            why = (
                f"{what} shows a password to whoever reads the manifest. Take it from a Secret, by a variable: $(NAME)."
            )
            findings.warn(f"{path}.{key}", "secret", why)


def _secret(name: str, value: str) -> bool:
    name = name.replace("-", "_")
    plain = value and not any(mark in value for mark in FILLED)
    return bool(plain and SECRET.fullmatch(name) and not VOCABULARY.fullmatch(name))


def _logs_in(text: str) -> str:
    """The scheme of the first URL in `text` that contains a password, or ""."""
    plain = (scheme for scheme, word in LOGIN.findall(text) if not any(mark in word for mark in FILLED))
    return next(plain, "")


def shell(template: Data) -> bool:
    """Whether the template runs a shell."""
    return "script" in template or _shell(template.get("container") or {})


def _shell(container: Data) -> bool:
    """Whether it runs `sh -c`, also via env, tini, timeout or busybox."""
    command = [str(word) for word in container.get("command") or []]
    words = [*command, *map(str, container.get("args") or [])]
    started = any(_is_shell(word) and re.fullmatch(r"-\w*c", after) for word, after in pairwise(words))
    return "source" in container or started or bool(command and _is_shell(command[0]))


def _is_shell(word: str) -> bool:
    return word.rpartition("/")[2] in SHELLS


def _calls(findings: Findings, path: str, container: Data) -> None:
    """`$(date)` needs a shell: Kubernetes only expands `$(VARIABLE)`."""
    if _shell(container):
        return
    known = {str(variable.get("name")) for variable in container.get("env") or []}
    for key in ("command", "args"):
        for text in container.get(key) or []:
            for inside in CALL.findall(str(text)):
                if inside not in known and not VARIABLE.fullmatch(inside):
                    findings.warn(f"{path}.{key}", "shell", call(inside))


def call(inside: str) -> str:
    """Why `$(inside)` is not expanded, and what to write instead."""
    way = "Run it by `sh -c`, or use a tag of the workflow's, such as {{workflow.creationTimestamp.Y}}"
    return f"$({inside}) stays as it is, for no shell reads it. {way}."

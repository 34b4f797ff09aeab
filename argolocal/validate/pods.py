"""Check containers of templates and applied objects.

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
PLACEHOLDERS = ("{{", UNKNOWN, "$")  # the value comes from elsewhere
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}

Containers = Iterable[tuple[str, Data]]


def containers_in(path: str, pod: Data, *lists: str) -> Iterator[tuple[str, Data]]:
    """Yield the path and container of each container in `lists` of a pod."""
    for key in lists or ("initContainers", "containers"):
        for number, container in enumerate(pod.get(key) or []):
            yield f"{path}.{key}[{container.get('name', number)}]", container


def check(findings: Findings, path: str, pod: Data, containers: Containers, whole: bool = True) -> None:
    """Check containers and their `pod`: a PodSpec, or a template's fields of it. Not `whole`: it overrides another."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key) is True:
            findings.warn(f"{path}.{key}", "security", "PodSecurity restricted rejects it: remove it.")
    for volume in pod.get("volumes") or []:
        if len(kinds := volume.keys() - {"name"}) == 1 and not kinds <= VOLUMES:
            message = f"PodSecurity restricted rejects {kinds.pop()}: use a persistentVolumeClaim or the object store."
            findings.warn(f"{path}.volumes[{volume.get('name')}]", "security", message)
    for where, container in containers:
        name = container.get("name")
        if name and UNKNOWN not in name and (not LABEL.fullmatch(name) or len(name) > 63):
            findings.add(where, "name", f'"{name}" must be at most 63 lower-case letters, digits and dashes.')
        for port in container.get("ports") or []:
            if len(str(port.get("name", ""))) > 15:
                findings.add(f"{where}.ports", "name", f'"{port["name"]}" must have at most 15 characters.')
        _image(findings, f"{where}.image", str(container.get("image") or ""))
        if whole or "resources" in container:
            check_resources(findings, f"{where}.resources", container.get("resources") or {})
        if whole:
            _security(findings, f"{where}.securityContext", pod.get("securityContext") or {}, container)
        _secrets(findings, where, container)
        _shell_calls(findings, where, container)


def check_probes(findings: Findings, containers: Containers) -> None:
    """Check that containers of a server have probes."""
    for where, container in containers:
        if missing := [key for key in ("readinessProbe", "livenessProbe") if key not in container]:
            reason = "without both, it gets requests before it can answer, and is not restarted if it hangs"
            findings.warn(where, "probe", f"give it a {' and a '.join(missing)}: {reason}.")


def _image(findings: Findings, path: str, image: str) -> None:
    if not image or "{{" in image or UNKNOWN in image or DIGEST.fullmatch(image):
        return
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if "@" in image:
        problem = "has an invalid digest: it must end with @sha256: and 64 hexadecimal digits."
    elif tag in ("", "latest"):
        problem = f"can change with every push{'' if tag else ', without a tag'}: pin it by digest (NAME@sha256:...)."
    else:
        problem = f'can change, as the tag "{tag}" can be pushed again: pin it by digest (NAME@sha256:...).'
    findings.add_image(path, image, problem)


def check_resources(findings: Findings, path: str, resources: Data) -> None:
    """Check that a container has requests for CPU and memory, and a memory limit."""
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    missing = [f"requests.{key}" for key in ("cpu", "memory") if key not in requests and key not in limits]
    missing += ["limits.memory"] if "memory" not in limits else []
    if missing:
        reason = "the scheduler needs the requests, and without a limit a pod may use up the node's memory"
        findings.warn(path, "resources", f"give {', '.join(missing)}: {reason}.")


def _security(findings: Findings, path: str, pod: Data, container: Data) -> None:
    context = container.get("securityContext") or {}
    merged = {**pod, **context}
    seccomp, capabilities = merged.get("seccompProfile") or {}, context.get("capabilities") or {}
    added = set(map(str, capabilities.get("add") or [])) - {"NET_BIND_SERVICE"}
    requirements = {
        "runAsNonRoot: true": merged.get("runAsNonRoot") in (True, UNKNOWN),
        "a runAsUser that is not 0": merged.get("runAsUser") != 0,
        "seccompProfile: {type: RuntimeDefault}": seccomp.get("type") in ("RuntimeDefault", "Localhost"),
        "allowPrivilegeEscalation: false": context.get("allowPrivilegeEscalation") in (False, UNKNOWN),
        "capabilities: {drop: [ALL]}": "ALL" in (capabilities.get("drop") or []) and not added,
        "privileged: false": not context.get("privileged"),
    }
    if missing := [name for name, is_met in requirements.items() if not is_met]:
        findings.warn(path, "security", f"PodSecurity restricted rejects it: it needs {', '.join(missing)}.")


def _secrets(findings: Findings, path: str, container: Data) -> None:
    """Report plain-text passwords in environment variables, flags and URLs."""
    for variable in container.get("env") or []:
        name, value = str(variable.get("name", "")), str(variable.get("value") or "")
        if _is_secret(name, value) or _login_scheme(value):
            message = "readers of the manifest see this secret: take it from a Secret (valueFrom.secretKeyRef)."
            findings.warn(f"{path}.env[{name}]", "secret", message)
    for key in ("command", "args"):
        words = [str(word) for word in container.get(key) or []]
        flags = [flag for text in words for flag in FLAG.findall(text)]
        flags += [(flag[2:], value) for flag, value in pairwise(words) if flag.startswith("--")]
        flag_names = [f"--{name}" for name, value in flags if not value.startswith("-") and _is_secret(name, value)]
        for source in dict.fromkeys(
            [*flag_names, *(f"{scheme}://" for text in words if (scheme := _login_scheme(text)))]
        ):
            message = f"{source} shows a password to readers of the manifest. Use a variable from a Secret: $(NAME)."
            findings.warn(f"{path}.{key}", "secret", message)


def _is_secret(name: str, value: str) -> bool:
    name = name.replace("-", "_")
    plain = value and not any(mark in value for mark in PLACEHOLDERS)
    return bool(plain and SECRET.fullmatch(name) and not VOCABULARY.fullmatch(name))


def _login_scheme(text: str) -> str:
    """Return the scheme of the first URL in `text` that contains a password, or ""."""
    plain = (scheme for scheme, word in LOGIN.findall(text) if not any(mark in word for mark in PLACEHOLDERS))
    return next(plain, "")


def runs_shell(template: Data) -> bool:
    """Return True if the template runs a shell."""
    return "script" in template or _runs_shell(template.get("container") or {})


def _runs_shell(container: Data) -> bool:
    """Return True if the container runs `sh -c`, also via env, tini, timeout or busybox."""
    command = [str(word) for word in container.get("command") or []]
    words = [*command, *map(str, container.get("args") or [])]
    started = any(_is_shell(word) and re.fullmatch(r"-\w*c", after) for word, after in pairwise(words))
    return "source" in container or started or bool(command and _is_shell(command[0]))


def _is_shell(word: str) -> bool:
    return word.rpartition("/")[2] in SHELLS


def _shell_calls(findings: Findings, path: str, container: Data) -> None:
    """Report `$(date)` without a shell: Kubernetes only expands `$(VARIABLE)`."""
    if _runs_shell(container):
        return
    variables = {str(variable.get("name")) for variable in container.get("env") or []}
    for key in ("command", "args"):
        for text in container.get(key) or []:
            for inside in CALL.findall(str(text)):
                if inside not in variables and not VARIABLE.fullmatch(inside):
                    findings.warn(f"{path}.{key}", "shell", shell_message(inside))


def shell_message(inside: str) -> str:
    """Return the message for `$(inside)` without a shell."""
    remedy = "Run it with `sh -c`, or use a tag, such as {{workflow.creationTimestamp.Y}}"
    return f"$({inside}) is not expanded, because it is not run by a shell. {remedy}."

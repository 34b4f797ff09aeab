"""Check the containers of templates and of the objects that resource templates apply.

The rules report unpinned images, missing resources, violations of PodSecurity `restricted`,
secrets, and shell syntax without a shell.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from argolocal.common.environment import names_secret, secret_flags
from argolocal.common.object_names import LABEL
from argolocal.manifest.types import Data
from argolocal.validate.findings import Findings
from argolocal.validate.tag_rules import TAG, UNKNOWN

DIGEST = re.compile(r".*@sha256:[0-9a-f]{64}")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
SHELL_CALL = re.compile(r"(?<!\$)\$\(([^()]+)\)")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
LOGIN_URL = re.compile(r"\b([a-z][a-z0-9+.-]{0,30})://[^\s/:@]*:([^\s/@]+)@", re.IGNORECASE)
# placeholders for values; a text that contains one of them is not a plain-text secret
PLACEHOLDERS = ("{{", UNKNOWN, "$")
ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}

Containers = Iterable[tuple[str, Data]]


def containers_in(path: str, pod: Data, *lists: str) -> Iterator[tuple[str, Data]]:
    """Yield the path and the body of each container in the fields `lists` of a pod."""
    for key in lists or ("initContainers", "containers"):
        for number, container in enumerate(pod.get(key) or []):
            yield f"{path}.{key}[{container.get('name', number)}]", container


def check(
    findings: Findings, path: str, pod: Data, containers: Containers, is_complete: bool = True
) -> None:
    """Check containers and their `pod`, which is a PodSpec or a template that contains fields of a
    PodSpec.

    `is_complete`: False if the PodSpec only overrides fields of another PodSpec.
    """
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key) is True:
            findings.warn(
                f"{path}.{key}", "security", "PodSecurity restricted rejects this field: remove it."
            )

    for volume in pod.get("volumes") or []:
        kinds = volume.keys() - {"name"}
        if len(kinds) == 1 and not kinds <= ALLOWED_VOLUMES:
            message = (
                f"PodSecurity restricted rejects {kinds.pop()}: use a persistentVolumeClaim or the"
                " object store."
            )
            findings.warn(f"{path}.volumes[{volume.get('name')}]", "security", message)

    for where, container in containers:
        name = container.get("name")
        if name and not LABEL.allows(TAG.sub("x", name.replace(UNKNOWN, "x"))):
            findings.add(
                where, "name", f'"{name}" must be at most 63 lower-case letters, digits and dashes.'
            )

        for port in container.get("ports") or []:
            if len(str(port.get("name", ""))) > 15:
                findings.add(
                    f"{where}.ports", "name", f'"{port["name"]}" must have at most 15 characters.'
                )

        _check_image(findings, f"{where}.image", str(container.get("image") or ""))
        if is_complete or "resources" in container:
            check_resources(findings, f"{where}.resources", container.get("resources") or {})

        if is_complete:
            _check_security(
                findings, f"{where}.securityContext", pod.get("securityContext") or {}, container
            )

        _check_secrets(findings, where, container)
        _check_shell_calls(findings, where, container)


def check_probes(findings: Findings, containers: Containers) -> None:
    """Check that containers of a server have probes."""
    for where, container in containers:
        missing_probes = [
            key for key in ("readinessProbe", "livenessProbe") if key not in container
        ]
        if missing_probes:
            reason = (
                "a server without probes gets requests before it can answer, and is not restarted"
                " if it hangs"
            )
            findings.warn(
                where, "probe", f"give the container a {' and a '.join(missing_probes)}: {reason}."
            )


def _check_image(findings: Findings, path: str, image: str) -> None:
    if not image or "{{" in image or UNKNOWN in image or DIGEST.fullmatch(image):
        return

    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if "@" in image:
        problem = "has an invalid digest: it must end with @sha256: and 64 hexadecimal digits."
    elif tag in ("", "latest"):
        problem = (
            f"can change with every push{'' if tag else ', without a tag'}: pin it by digest"
            " (NAME@sha256:...)."
        )
    else:
        problem = (
            f'can change, as the tag "{tag}" can be pushed again: pin it by digest'
            " (NAME@sha256:...)."
        )

    findings.add_image(path, image, problem)


def check_resources(findings: Findings, path: str, resources: Data) -> None:
    """Check that a container has CPU and memory requests, and a memory limit."""
    requests = resources.get("requests") or {}
    limits = resources.get("limits") or {}
    missing_fields = [
        f"requests.{key}" for key in ("cpu", "memory") if key not in requests and key not in limits
    ]
    missing_fields += ["limits.memory"] if "memory" not in limits else []

    if missing_fields:
        reason = (
            "the scheduler needs the requests, and without a limit a pod may use up the node's"
            " memory"
        )
        findings.warn(path, "resources", f"give {', '.join(missing_fields)}: {reason}.")


def _check_security(findings: Findings, path: str, pod: Data, container: Data) -> None:
    context = container.get("securityContext") or {}
    merged_context = {**pod, **context}
    seccomp = merged_context.get("seccompProfile") or {}
    capabilities = context.get("capabilities") or {}
    added_capabilities = set(map(str, capabilities.get("add") or [])) - {"NET_BIND_SERVICE"}

    requirements = {
        "runAsNonRoot: true": merged_context.get("runAsNonRoot") in (True, UNKNOWN),
        "a runAsUser that is not 0": merged_context.get("runAsUser") != 0,
        "seccompProfile: {type: RuntimeDefault}": (
            seccomp.get("type") in ("RuntimeDefault", "Localhost")
        ),
        "allowPrivilegeEscalation: false": (
            context.get("allowPrivilegeEscalation") in (False, UNKNOWN)
        ),
        "capabilities: {drop: [ALL]}": (
            "ALL" in (capabilities.get("drop") or []) and not added_capabilities
        ),
        "privileged: false": not context.get("privileged"),
    }

    missing_settings = [name for name, is_met in requirements.items() if not is_met]
    if missing_settings:
        message = (
            "PodSecurity restricted rejects this container: it needs"
            f" {', '.join(missing_settings)}."
        )
        findings.warn(path, "security", message)


def _check_secrets(findings: Findings, path: str, container: Data) -> None:
    """Report plain-text passwords in environment variables, flags and URLs."""
    for variable in container.get("env") or []:
        name = str(variable.get("name", ""))
        value = str(variable.get("value") or "")
        if (names_secret(name) and _is_plain_text(value)) or _login_scheme(value):
            message = (
                "readers of the manifest see this secret: take it from a Secret"
                " (valueFrom.secretKeyRef)."
            )
            findings.warn(f"{path}.env[{name}]", "secret", message)

    for key in ("command", "args"):
        words = [str(word) for word in container.get(key) or []]
        flag_names = [f"--{name}" for name, value in secret_flags(words) if _is_plain_text(value)]
        for source in dict.fromkeys(
            [*flag_names, *(f"{scheme}://" for text in words if (scheme := _login_scheme(text)))]
        ):
            message = (
                f"{source} shows a password to readers of the manifest. Use a variable from a"
                " Secret: $(NAME)."
            )
            findings.warn(f"{path}.{key}", "secret", message)


def _is_plain_text(value: str) -> bool:
    return bool(value) and not any(mark in value for mark in PLACEHOLDERS)


def _login_scheme(text: str) -> str:
    """Return the scheme, such as https, of the first URL in `text` that contains a password, or
    ""."""
    schemes = (
        scheme
        for scheme, word in LOGIN_URL.findall(text)
        if not any(mark in word for mark in PLACEHOLDERS)
    )
    return next(schemes, "")


def runs_shell(template: Data) -> bool:
    """Return True if the template runs a shell."""
    return "script" in template or _runs_shell(template.get("container") or {})


def _runs_shell(container: Data) -> bool:
    """Return True if the container runs `sh -c`, directly or via env, tini, timeout or busybox."""
    command = [str(word) for word in container.get("command") or []]
    words = [*command, *map(str, container.get("args") or [])]
    starts_shell = any(
        _is_shell(word) and re.fullmatch(r"-\w*c", next_word) for word, next_word in pairwise(words)
    )
    return "source" in container or starts_shell or bool(command and _is_shell(command[0]))


def _is_shell(word: str) -> bool:
    return word.rpartition("/")[2] in SHELLS


def _check_shell_calls(findings: Findings, path: str, container: Data) -> None:
    """Report shell syntax such as `$(date)` in a container that runs no shell. Kubernetes only
    expands `$(VARIABLE)`."""
    if _runs_shell(container):
        return
    variables = {str(variable.get("name")) for variable in container.get("env") or []}
    for key in ("command", "args"):
        for text in container.get(key) or []:
            for command in SHELL_CALL.findall(str(text)):
                if command not in variables and not VARIABLE.fullmatch(command):
                    findings.warn(f"{path}.{key}", "shell", shell_message(command))


def shell_message(command: str) -> str:
    """Return the message about `$(command)` in a container that runs no shell."""
    remedy = "Run it with `sh -c`, or use a tag, such as {{workflow.creationTimestamp.Y}}"
    return f"$({command}) is not expanded, because no shell runs the command. {remedy}."

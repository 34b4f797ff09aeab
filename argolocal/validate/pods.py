"""Check the containers of templates and of the objects that resource templates apply.

The rules report unpinned images, missing resources, violations of PodSecurity `restricted`,
secrets, and shell syntax without a shell.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from argolocal.common.environment import find_secret_flags, is_secret_name
from argolocal.common.object_names import LABEL_RULE
from argolocal.manifest.types import Data
from argolocal.validate.findings import Findings
from argolocal.validate.tag_rules import TAG, UNKNOWN_VALUE

IMAGE_DIGEST = re.compile(r".*@sha256:[0-9a-f]{64}")
SHELLS = ("sh", "bash", "ash", "dash", "zsh")
SHELL_CALL = re.compile(r"(?<!\$)\$\(([^()]+)\)")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
LOGIN_URL = re.compile(r"\b([a-z][a-z0-9+.-]{0,30})://[^\s/:@]*:([^\s/@]+)@", re.IGNORECASE)
# A text that contains one of these strings gets its value later, so it is not a plain-text secret.
PLACEHOLDERS = ("{{", UNKNOWN_VALUE, "$")
# kinds of volumes that PodSecurity `restricted` allows
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


def list_containers(path: str, pod: Data, *list_fields: str) -> Iterator[tuple[str, Data]]:
    """Yield the path and the body of each container in the fields `list_fields` of a pod."""
    for list_field in list_fields or ("initContainers", "containers"):
        for index, container in enumerate(pod.get(list_field) or []):
            yield f"{path}.{list_field}[{container.get('name', index)}]", container


def check_containers(
    findings: Findings, path: str, pod: Data, containers: Containers, is_complete: bool = True
) -> None:
    """Check containers and their pod. `pod`: a PodSpec, or a template, which has some fields of a
    PodSpec.

    `is_complete` is False if the PodSpec only overrides fields of another PodSpec.
    """
    for host_field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(host_field) is True:
            findings.warn(
                f"{path}.{host_field}",
                "security",
                "PodSecurity restricted rejects this field: remove it.",
            )

    for volume in pod.get("volumes") or []:
        volume_kinds = volume.keys() - {"name"}
        if len(volume_kinds) == 1 and not volume_kinds <= ALLOWED_VOLUMES:
            message = (
                f"PodSecurity restricted rejects {volume_kinds.pop()}: use a persistentVolumeClaim"
                " or the object store."
            )
            findings.warn(f"{path}.volumes[{volume.get('name')}]", "security", message)

    for container_path, container in containers:
        container_name = container.get("name")
        if container_name and not LABEL_RULE.allows(
            TAG.sub("x", container_name.replace(UNKNOWN_VALUE, "x"))
        ):
            findings.add(
                container_path,
                "name",
                f'"{container_name}" must be at most 63 lower-case letters, digits and dashes.',
            )

        for port in container.get("ports") or []:
            if len(str(port.get("name", ""))) > 15:
                findings.add(
                    f"{container_path}.ports",
                    "name",
                    f'"{port["name"]}" must have at most 15 characters.',
                )

        _check_image(findings, f"{container_path}.image", str(container.get("image") or ""))
        if is_complete or "resources" in container:
            check_resources(
                findings, f"{container_path}.resources", container.get("resources") or {}
            )

        if is_complete:
            _check_security(
                findings,
                f"{container_path}.securityContext",
                pod.get("securityContext") or {},
                container,
            )

        _check_secrets(findings, container_path, container)
        _check_shell_calls(findings, container_path, container)


def check_probes(findings: Findings, containers: Containers) -> None:
    """Check that containers of a server have probes."""
    for container_path, container in containers:
        missing_probes = [
            probe_field
            for probe_field in ("readinessProbe", "livenessProbe")
            if probe_field not in container
        ]
        if missing_probes:
            reason = (
                "a server without probes gets requests before it can answer, and is not restarted"
                " if it hangs"
            )
            findings.warn(
                container_path,
                "probe",
                f"give the container a {' and a '.join(missing_probes)}: {reason}.",
            )


def _check_image(findings: Findings, path: str, image: str) -> None:
    """Warn about an image without a digest. Template tags in the name of the image are accepted."""
    if not image or "{{" in image or UNKNOWN_VALUE in image or IMAGE_DIGEST.fullmatch(image):
        return

    image_tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    if "@" in image:
        problem = "has an invalid digest: it must end with @sha256: and 64 hexadecimal digits."
    elif image_tag in ("", "latest"):
        problem = (
            f"can change with every push{'' if image_tag else ', without a tag'}: pin it by digest"
            " (NAME@sha256:...)."
        )
    else:
        problem = (
            f'can change, as the tag "{image_tag}" can be pushed again: pin it by digest'
            " (NAME@sha256:...)."
        )

    findings.add_image(path, image, problem)


def check_resources(findings: Findings, path: str, resources: Data) -> None:
    """Warn about a container without CPU and memory requests, or without a memory limit."""
    requests = resources.get("requests") or {}
    limits = resources.get("limits") or {}
    missing_fields = [
        f"requests.{resource_name}"
        for resource_name in ("cpu", "memory")
        if resource_name not in requests and resource_name not in limits
    ]
    missing_fields += ["limits.memory"] if "memory" not in limits else []

    if missing_fields:
        reason = (
            "the scheduler needs the requests, and without a limit a pod may use up the node's"
            " memory"
        )
        findings.warn(path, "resources", f"give {', '.join(missing_fields)}: {reason}.")


def _check_security(findings: Findings, path: str, pod: Data, container: Data) -> None:
    """Warn about a container that PodSecurity `restricted` rejects. `pod`: the pod's
    securityContext."""
    security_context = container.get("securityContext") or {}
    merged_context = {**pod, **security_context}
    seccomp_profile = merged_context.get("seccompProfile") or {}
    capabilities = security_context.get("capabilities") or {}
    added_capabilities = set(map(str, capabilities.get("add") or [])) - {"NET_BIND_SERVICE"}

    requirements = {
        "runAsNonRoot: true": merged_context.get("runAsNonRoot") in (True, UNKNOWN_VALUE),
        "a runAsUser that is not 0": merged_context.get("runAsUser") != 0,
        "seccompProfile: {type: RuntimeDefault}": (
            seccomp_profile.get("type") in ("RuntimeDefault", "Localhost")
        ),
        "allowPrivilegeEscalation: false": (
            security_context.get("allowPrivilegeEscalation") in (False, UNKNOWN_VALUE)
        ),
        "capabilities: {drop: [ALL]}": (
            "ALL" in (capabilities.get("drop") or []) and not added_capabilities
        ),
        "privileged: false": not security_context.get("privileged"),
    }

    missing_settings = [setting_name for setting_name, is_met in requirements.items() if not is_met]
    if missing_settings:
        message = (
            "PodSecurity restricted rejects this container: it needs"
            f" {', '.join(missing_settings)}."
        )
        findings.warn(path, "security", message)


def _check_secrets(findings: Findings, path: str, container: Data) -> None:
    """Report plain-text passwords in environment variables, flags and URLs."""
    for env_variable in container.get("env") or []:
        variable_name = str(env_variable.get("name", ""))
        value = str(env_variable.get("value") or "")
        if (is_secret_name(variable_name) and _is_plain_text(value)) or _find_login_scheme(value):
            message = (
                "readers of the manifest see this secret: take it from a Secret"
                " (valueFrom.secretKeyRef)."
            )
            findings.warn(f"{path}.env[{variable_name}]", "secret", message)

    for command_field in ("command", "args"):
        command_words = [str(command_word) for command_word in container.get(command_field) or []]
        flag_names = [
            f"--{variable_name}"
            for variable_name, value in find_secret_flags(command_words)
            if _is_plain_text(value)
        ]
        for secret_source in dict.fromkeys(
            [
                *flag_names,
                *(
                    f"{scheme}://"
                    for argument_text in command_words
                    if (scheme := _find_login_scheme(argument_text))
                ),
            ]
        ):
            message = (
                f"{secret_source} shows a password to readers of the manifest. Use a variable from"
                " a Secret: $(NAME)."
            )
            findings.warn(f"{path}.{command_field}", "secret", message)


def _is_plain_text(value: str) -> bool:
    """Return True if a value is written in the manifest, and not inserted later."""
    return bool(value) and not any(placeholder in value for placeholder in PLACEHOLDERS)


def _find_login_scheme(text: str) -> str:
    """Return the scheme, such as https, of the first URL with a plain-text password in `text`; ""
    if `text` does not contain such a URL."""
    schemes = (
        scheme
        for scheme, password in LOGIN_URL.findall(text)
        if not any(placeholder in password for placeholder in PLACEHOLDERS)
    )
    return next(schemes, "")


def runs_shell(template: Data) -> bool:
    """Return True if the template runs a shell."""
    return "script" in template or _runs_shell(template.get("container") or {})


def _runs_shell(container: Data) -> bool:
    """Return True if the container runs `sh -c`, directly or via env, tini, timeout or busybox."""
    command = [str(command_word) for command_word in container.get("command") or []]
    command_words = [*command, *map(str, container.get("args") or [])]
    starts_shell = any(
        _is_shell(command_word) and re.fullmatch(r"-\w*c", next_word)
        for command_word, next_word in pairwise(command_words)
    )
    return "source" in container or starts_shell or bool(command and _is_shell(command[0]))


def _is_shell(word: str) -> bool:
    return word.rpartition("/")[2] in SHELLS


def _check_shell_calls(findings: Findings, path: str, container: Data) -> None:
    """Warn about shell syntax such as `$(date)` in a container that does not run a shell.
    Kubernetes expands only `$(VARIABLE)`."""
    if _runs_shell(container):
        return
    variables = {str(env_variable.get("name")) for env_variable in container.get("env") or []}
    for command_field in ("command", "args"):
        for argument_text in container.get(command_field) or []:
            for command in SHELL_CALL.findall(str(argument_text)):
                if command not in variables and not VARIABLE.fullmatch(command):
                    findings.warn(f"{path}.{command_field}", "shell", make_shell_message(command))


def make_shell_message(command: str) -> str:
    """Return the message about `$(command)` in a container that does not run a shell."""
    remedy = "Run it with `sh -c`, or use a tag, such as {{workflow.creationTimestamp.Y}}"
    return f"$({command}) is not expanded, because no shell runs the command. {remedy}."

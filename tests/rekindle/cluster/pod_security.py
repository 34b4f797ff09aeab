"""The PodSecurity standard `restricted` (Kubernetes 1.34, including `baseline`) as a function over
plain data.

violations(pod_spec) -> ["containers[0].securityContext.allowPrivilegeEscalation must be false",
...] pods(manifest) -> every PodSpec in it, at any depth; for workflows, the pods that Argo creates
for their steps
"""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def find_violations(spec: dict[str, Any]) -> list[str]:
    pod = spec.get("securityContext") or {}
    problems = [
        f"{field} must not be set"
        for field in ("hostNetwork", "hostPID", "hostIPC")
        if spec.get(field)
    ]
    for volume in spec.get("volumes") or []:
        if not set(volume) - {"name"} <= VOLUMES:
            problems.append(f"volume {volume}: its kind is not allowed")

    problems += [
        f"sysctl {s['name']} is not allowed"
        for s in pod.get("sysctls") or []
        if s["name"] not in SYSCTLS
    ]
    for field_name in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(field_name) or []:
            problems += [
                f"{container['name']}: {problem}" for problem in _check_container(container, pod)
            ]

    return problems


def _check_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext") or {}
    capabilities = context.get("capabilities") or {}
    if context.get("privileged"):
        yield "privileged must be false"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation must be false"
    if "ALL" not in (capabilities.get("drop") or []):
        yield "capabilities.drop must hold ALL"
    if set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add may hold NET_BIND_SERVICE only"
    if not context.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot must be true"
    if 0 in (context.get("runAsUser"), pod.get("runAsUser")):
        yield "runAsUser must not be 0"

    if (context.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in (
        "RuntimeDefault",
        "Localhost",
    ):
        yield "seccompProfile.type must be RuntimeDefault or Localhost"

    if context.get("procMount", "Default") != "Default":
        yield "procMount must be Default"

    for settings in (context, pod):
        selinux = settings.get("seLinuxOptions") or {}
        if selinux.get("type", "") not in SELINUX or selinux.get("user") or selinux.get("role"):
            yield "seLinuxOptions must not change user, role, or to another type"
        if (settings.get("appArmorProfile") or {}).get("type", "RuntimeDefault") == "Unconfined":
            yield "appArmorProfile must not be Unconfined"
        if (settings.get("windowsOptions") or {}).get("hostProcess"):
            yield "hostProcess must be false"

    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield "hostPort must not be set"


def find_pods(manifest: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, PodSpec); of all pods in a manifest; the pods of a workflow include the
    containers that Argo adds."""
    if not isinstance(manifest, dict):
        for item in manifest if isinstance(manifest, list) else ():
            yield from find_pods(item)

        return

    spec = manifest.get("spec") or {}
    if isinstance(spec, dict) and "templates" in spec:
        for template in spec["templates"]:
            text = (template.get("resource") or {}).get("manifest")
            if text:
                yield from find_pods(json.loads(re.sub(r"\{\{.*?\}\}", "1", text)))

            for kind in ("container", "script", "resource"):
                if kind in template:
                    yield template["name"], _harden_like_argo(template, template[kind], spec)
    elif "containers" in manifest:
        yield manifest["containers"][0]["name"], manifest
    else:
        for value in manifest.values():
            yield from find_pods(value)


def _harden_like_argo(
    template: dict[str, Any], main_container: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    """Return the PodSpec that Argo makes of a template; Argo hardens the container `main` of a
    resource template, but not the containers `init` and `wait`.

    The behaviour follows Argo 3.7 and 4.1, workflow/controller/workflowpod.go.
    """
    hardened = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

    pod = {
        key: copy.deepcopy(spec[key])
        for key in ("securityContext", "automountServiceAccountToken")
        if key in spec
    }

    pod["volumes"] = [*(spec.get("volumes") or []), *(template.get("volumes") or [])]

    if "resource" in template:
        return pod | {"containers": [{"name": "main", "securityContext": hardened}]}

    pod["initContainers"] = [{"name": "init"}]
    pod["containers"] = [{"name": "wait"}, {**main_container, "name": "main"}]
    patch = json.loads(template.get("podSpecPatch") or "{}")

    for list_name in ("initContainers", "containers"):
        for fields in patch.pop(list_name, []):
            next(
                container for container in pod[list_name] if container["name"] == fields["name"]
            ).update(fields)

    return pod | patch

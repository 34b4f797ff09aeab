"""The outcome of a workflow, as plain data, and the comparison of two outcomes.

outcome = of_status("NAME", status, contents)      # contents(key) → {path: text} of an artifact
different = differences(mine, argo)                # one line each; empty if they are equal

An outcome consists of the phase, the message and the outputs of a workflow, and of every node its
name (WF stands for the workflow's name), type, phase, message, outputs, exit code, input
parameters, artifacts and children. Only keys of the recorded outcome are compared.
"""

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argolocal.store import ObjectStore

Outcome = dict[str, Any]
Contents = Callable[[str], dict[str, str]]
END_PHASES = ("Succeeded", "Failed", "Error")
# name of an artifact that exists only on a cluster
LOGS = "main-logs"
# never ends
STUCK_PHASE = "Stuck"
# prefix of the message of a workflow that Argo's validation rejects
REJECTED_PREFIX = "invalid spec"
# patterns of messages that end in texts of a kubelet, a store or a Go library
CLASSES = (
    r"(?P<text>.*(init|wait): Error \(exit code 64\): artifact \S+ failed to (load|save)):.*",
    r"(?P<text>invalid spec):.*",
    r"(?P<text>.*error processing data step \d+): .*",
    (
        r"(?P<text>(.*: )?)(invalid (operation|argument)|cannot (use|fetch)|type .* has no"
        r" field|unexpected token)\b.*"
    ),
    r"(?P<text>.*error decoding patch): .*",
    r"(?P<text>.*failed to initialize semaphore) .* with limit.*",
    r"Waiting for [^/]+(?P<text>/.*)",
    r"(?P<text>could not find node named .*, index \d+ in Children of node) .*",
    # the text is random if several parallel steps fail
    r"(?P<text>failed to resolve references): .*",
)
# messages of nodes with a killed pod, whose result and exit code depend on milliseconds
KILLED = (
    "Pod was active on the node longer than the specified deadline",
    "Step exceeded its deadline",
)


def of_status(name: str, status: dict[str, Any], contents: Contents | None = None) -> Outcome:
    """Convert the WorkflowStatus of a workflow to an outcome."""
    for ip in {node["podIP"] for node in (status.get("nodes") or {}).values() if node.get("podIP")}:
        status = json.loads(json.dumps(status).replace(ip, "IP"))

    outputs = (status.get("outputs") or {}).get("parameters") or []
    nodes: dict[str, Any] = status.get("nodes") or {}
    names: dict[str, str] = {id: node["name"].replace(name, "WF", 1) for id, node in nodes.items()}
    converted = [_summarize_node(node, name, names, contents) for node in nodes.values()]

    return {
        "phase": status.get("phase", ""),
        "message": status.get("message") or "",
        "outputs": {parameter["name"]: parameter.get("value") for parameter in outputs},
        "nodes": sorted(converted, key=lambda node: node["name"]),
    }


def _summarize_node(
    node: dict[str, Any], name: str, names: dict[str, str], contents: Contents | None
) -> dict[str, Any]:
    outputs = node.get("outputs") or {}
    children: list[str] = node.get("children") or []

    summary = {
        "name": node["name"].replace(name, "WF", 1),
        "displayName": node["displayName"].replace(name, "WF", 1),
        "type": node["type"],
        "phase": node["phase"],
        "message": node.get("message") or "",
        "params": {item["name"]: item.get("value") for item in outputs.get("parameters") or []},
        "result": outputs.get("result"),
        "exitCode": outputs.get("exitCode"),
        "inputs": {
            item["name"]: item.get("value")
            for item in (node.get("inputs") or {}).get("parameters") or []
        },
        "children": sorted(names.get(id, id) for id in children),
    }

    if node.get("podIP"):
        summary["daemon"] = True

    artifacts = [
        item for item in outputs.get("artifacts") or [] if (item.get("s3") or {}).get("key")
    ]
    if artifacts and contents and node["type"] == "Pod":
        summary["artifacts"] = {
            item["name"]: contents(item["s3"]["key"]) for item in artifacts if item["name"] != LOGS
        }

    return summary


def in_store(store: ObjectStore) -> Contents:
    """Return a reader of the artifacts in a bucket; it reads the files of an archive, a file, or
    all files below a key."""

    def contents(key: str) -> dict[str, str]:
        return {
            f"{entry.key.removeprefix(key)}{path}": text
            for entry in store.list(key)
            if entry.key == key or entry.key.removeprefix(key).startswith("/") or key.endswith("/")
            for path, text in _read_files(_read(store, entry.key)).items()
        }

    return contents


def _read(store: ObjectStore, key: str) -> bytes:
    with TemporaryDirectory() as folder:
        store.download(key, Path(folder, "object"))
        return Path(folder, "object").read_bytes()


def _read_files(data: bytes) -> dict[str, str]:
    if data[:2] == b"\x1f\x8b":
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            return {
                f"{member.name}{'/' * member.isdir()}": _read_member(archive, member)
                for member in archive
                if member.name != "."
            }
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {member: _read_text(archive.read(member)) for member in archive.namelist()}
    return {"": _read_text(data)}


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"-> {member.linkname}"
    file = archive.extractfile(member)
    if file:
        return _read_text(file.read())
    return ""


def _read_text(data: bytes) -> str:
    """Return the text of an artifact's file or, for a nested archive, the texts of the files in
    it."""
    if data[:2] not in (b"\x1f\x8b", b"PK"):
        return data.decode()
    return str(_read_files(data))


def list_differences(local_outcome: Outcome, argo_outcome: Outcome) -> list[str]:
    """Return a line for each difference between the outcomes of the local runner and of Argo."""
    return list(_iterate_differences(local_outcome, argo_outcome))


def _iterate_differences(local_outcome: Outcome, argo_outcome: Outcome) -> Iterator[str]:
    if is_rejected(argo_outcome) or is_rejected(local_outcome):
        if is_rejected(argo_outcome) != is_rejected(local_outcome):
            outcome, place = (
                (local_outcome, "here") if is_rejected(local_outcome) else (argo_outcome, "on Argo")
            )
            yield f"rejected {place} only: {outcome['message']}"

        return

    if (
        argo_outcome["phase"] == STUCK_PHASE
    ):  # in this case, Argo waits for ever, but the local runner ends the workflow with a reason
        if local_outcome["phase"] != "Error" or "Argo would wait" not in local_outcome["message"]:
            phase, message = local_outcome["phase"], local_outcome["message"]
            yield f"phase: {phase} here ({message}), Argo never ends"

        argo_outcome = argo_outcome.get("was") or argo_outcome
    else:
        for key in ("phase", "message"):
            yield from _compare_values(key, local_outcome[key], argo_outcome.get(key, ""))

    yield from _compare_values("outputs", local_outcome["outputs"], argo_outcome.get("outputs", {}))
    local_nodes, argo_nodes = (
        {node["name"]: node for node in side["nodes"]} for side in (local_outcome, argo_outcome)
    )
    killed_nodes = {
        name for name, node in argo_nodes.items() if node["message"] in KILLED or node.get("daemon")
    }
    killed_nodes.update(
        {
            name
            for name in argo_nodes
            if any(f"{name}({count})" in killed_nodes for count in range(10))
        }
    )

    for name in sorted({*local_nodes, *argo_nodes}):
        if name not in local_nodes or name not in argo_nodes:
            node = local_nodes.get(name) or argo_nodes[name]
            yield (
                f"{name}: {'here' if name in local_nodes else 'on Argo'} only ({node['type']}"
                f" {node['phase']})"
            )
            continue

        for key, value in argo_nodes[name].items():
            if key in ("result", "exitCode") and name in killed_nodes:
                continue

            yield from _compare_values(f"{name}: {key}", local_nodes[name].get(key), value)


def is_rejected(outcome: Outcome) -> bool:
    """Return True if an outcome says that the manifest was rejected."""
    return outcome.get("message", "").startswith(REJECTED_PREFIX)


def _compare_values(name: str, local_value: Any, argo_value: Any) -> Iterator[str]:
    if (_classify_message(local_value) if isinstance(local_value, str) else local_value) != (
        _classify_message(argo_value) if isinstance(argo_value, str) else argo_value
    ):
        yield f"{name}: {local_value!r} here, {argo_value!r} on Argo"


def _classify_message(message: str) -> str:
    for pattern in CLASSES:
        match = re.fullmatch(pattern, message, re.DOTALL)
        if match:
            return match["text"]
    return message

"""What became of a workflow, as plain data that two runners can be compared by.

outcome = of_status("NAME", status, contents)      # contents(key) → {path: text} of an artifact
different = differences(mine, argos)               # one line each; none if they agree

Phase, message, outputs, and of every node its name (WF for the workflow's), type, phase, message, outputs, exit code,
input parameters, artifacts and children. What a recorded outcome does not say is not compared.
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
OVER = ("Succeeded", "Failed", "Error")
LOGS = "main-logs"  # an artifact that only a cluster makes
STUCK = "Stuck"  # it would never end
REFUSED = "invalid spec"  # how the message of what Argo's own check refuses begins
# messages whose rest is the words of a kubelet, a store or a Go library
CLASSES = (
    r"(?P<said>.*(init|wait): Error \(exit code 64\): artifact \S+ failed to (load|save)):.*",
    r"(?P<said>invalid spec):.*",
    r"(?P<said>.*error processing data step \d+): .*",
    r"(?P<said>(.*: )?)(invalid (operation|argument)|cannot (use|fetch)|type .* has no field|unexpected token)\b.*",
    r"(?P<said>.*error decoding patch): .*",
    r"(?P<said>.*failed to initialize semaphore) .* with limit.*",
    r"Waiting for [^/]+(?P<said>/.*)",
    r"(?P<said>could not find node named .*, index \d+ in Children of node) .*",
    r"(?P<said>failed to resolve references): .*",  # of parallel steps: which of them is heard first is chance
)
# whose pod was killed: what it leaves, and with which code, is a matter of milliseconds
KILLED = ("Pod was active on the node longer than the specified deadline", "Step exceeded its deadline")


def of_status(name: str, status: dict[str, Any], contents: Contents | None = None) -> Outcome:
    """The outcome that a WorkflowStatus says."""
    for ip in {node["podIP"] for node in (status.get("nodes") or {}).values() if node.get("podIP")}:
        status = json.loads(json.dumps(status).replace(ip, "IP"))
    outputs = (status.get("outputs") or {}).get("parameters") or []
    nodes: dict[str, Any] = status.get("nodes") or {}
    names: dict[str, str] = {id: node["name"].replace(name, "WF", 1) for id, node in nodes.items()}
    converted = [_node(node, name, names, contents) for node in nodes.values()]
    return {
        "phase": status.get("phase", ""),
        "message": status.get("message") or "",
        "outputs": {parameter["name"]: parameter.get("value") for parameter in outputs},
        "nodes": sorted(converted, key=lambda node: node["name"]),
    }


def _node(node: dict[str, Any], name: str, names: dict[str, str], contents: Contents | None) -> dict[str, Any]:
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
        "inputs": {item["name"]: item.get("value") for item in (node.get("inputs") or {}).get("parameters") or []},
        "children": sorted(names.get(id, id) for id in children),
    }
    if node.get("podIP"):
        summary["daemon"] = True
    artifacts = [item for item in outputs.get("artifacts") or [] if (item.get("s3") or {}).get("key")]
    if artifacts and contents and node["type"] == "Pod":
        summary["artifacts"] = {item["name"]: contents(item["s3"]["key"]) for item in artifacts if item["name"] != LOGS}
    return summary


def in_store(store: ObjectStore) -> Contents:
    """Artifacts in a bucket: what an archive holds, a file, or all below a key."""

    def contents(key: str) -> dict[str, str]:
        return {
            f"{entry.key.removeprefix(key)}{path}": text
            for entry in store.list(key)
            if entry.key == key or entry.key.removeprefix(key).startswith("/") or key.endswith("/")
            for path, text in _files(_read(store, entry.key)).items()
        }

    return contents


def _read(store: ObjectStore, key: str) -> bytes:
    with TemporaryDirectory() as folder:
        store.download(key, Path(folder, "object"))
        return Path(folder, "object").read_bytes()


def _files(data: bytes) -> dict[str, str]:
    if data[:2] == b"\x1f\x8b":
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            return {
                f"{member.name}{'/' * member.isdir()}": _member(archive, member)
                for member in archive
                if member.name != "."
            }
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {member: _text(archive.read(member)) for member in archive.namelist()}
    return {"": _text(data)}


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"-> {member.linkname}"
    file = archive.extractfile(member)
    return _text(file.read()) if file else ""


def _text(data: bytes) -> str:
    """What a file holds; of an archive within, what is in it."""
    return data.decode() if data[:2] not in (b"\x1f\x8b", b"PK") else str(_files(data))


def differences(mine: Outcome, argos: Outcome) -> list[str]:
    """In which points the local runner's outcome is another than Argo's, a line each."""
    return list(_differences(mine, argos))


def _differences(mine: Outcome, argos: Outcome) -> Iterator[str]:
    if refused(argos) or refused(mine):
        if refused(argos) != refused(mine):
            outcome, where = (mine, "here") if refused(mine) else (argos, "on Argo")
            yield f"refused {where} only: {outcome['message']}"
        return
    if argos["phase"] == STUCK:  # Argo waits for ever; here that is an end with its reason
        if mine["phase"] != "Error" or "Argo would wait" not in mine["message"]:
            yield f"phase: {mine['phase']} here ({mine['message']}), Argo never ends"
        argos = argos.get("was") or argos
    else:
        for key in ("phase", "message"):
            yield from _unequal(key, mine[key], argos.get(key, ""))
    yield from _unequal("outputs", mine["outputs"], argos.get("outputs", {}))
    here, there = ({node["name"]: node for node in side["nodes"]} for side in (mine, argos))
    killed = {name for name, node in there.items() if node["message"] in KILLED or node.get("daemon")}
    killed |= {name for name in there if any(f"{name}({count})" in killed for count in range(10))}
    for name in sorted({*here, *there}):
        if name not in here or name not in there:
            node = here.get(name) or there[name]
            yield f"{name}: {'here' if name in here else 'on Argo'} only ({node['type']} {node['phase']})"
            continue
        for key, value in there[name].items():
            if key in ("result", "exitCode") and name in killed:
                continue
            yield from _unequal(f"{name}: {key}", here[name].get(key), value)


def refused(outcome: Outcome) -> bool:
    """Whether nothing ran, as the manifest is none."""
    return outcome.get("message", "").startswith(REFUSED)


def _unequal(what: str, mine: Any, argos: Any) -> Iterator[str]:
    if (_class(mine) if isinstance(mine, str) else mine) != (_class(argos) if isinstance(argos, str) else argos):
        yield f"{what}: {mine!r} here, {argos!r} on Argo"


def _class(message: str) -> str:
    for pattern in CLASSES:
        if match := re.fullmatch(pattern, message, re.DOTALL):
            return match["said"]
    return message

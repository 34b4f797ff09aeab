"""Compare the facts of two cache keys, to explain why a step does not reuse an earlier result.

The fact `code` is one hash of many files. The object `cache-code/HASH` lists these files, once for
all entries with this hash.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import loads, to_json
from rekindle.cache import code, entries
from rekindle.cache.key import Facts, modules_of
from rekindle.documents import Document, validate
from rekindle.errors import Conflict, NotFound, StorageError
from rekindle.names import Digest

if TYPE_CHECKING:
    from rekindle.storage import Store

CODE_FOLDER = "cache-code/"
MISSING = "missing"


@dataclass(frozen=True)
class Difference:
    """A fact that has changed. `kind`: code, image, input, data or upstream; `name`: the changed
    module, config key, URI, artifact or task."""

    kind: str
    name: str
    before: str = ""
    now: str = ""


class CodeFile(Document):
    """The object `cache-code/HASH`: the values that HASH was computed from."""

    python: str
    packages: list[str]
    files: dict[str, str]


def record_code(store: "Store", facts: Facts) -> None:
    """Store the list of files behind the code's identity, unless the identity is the digest of an
    image. Raises StorageError."""
    if not facts["code"].startswith(code.IMAGE_DIGEST):
        with suppress(Conflict):
            store.put(
                f"{CODE_FOLDER}{facts['code']}",
                to_json(code.identity_facts(modules_of(facts))).encode(),
                if_absent=True,
            )


def remove_unused_code(store: "Store") -> None:
    """Delete the lists of files that no entry refers to. Raises StorageError."""
    used = {f"{CODE_FOLDER}{entry.facts.get('code')}" for entry in entries.read_entries(store)}
    unused = (item.key for item in store.list(CODE_FOLDER) if item.key not in used)
    store.delete([key for key in unused if Digest.matches(key.removeprefix(CODE_FOLDER))])


def list_differences(store: "Store", before: Facts, now: Facts) -> list[Difference]:
    """List the differences between two sets of facts, most relevant first. Inputs and data that
    `now` does not contain are ignored."""
    if before.get("code") != now["code"]:
        result = list(_code_differences(store, before, now))
    else:
        result = []

    for kind in ("inputs", "data_read", "artifacts"):
        facts = now.get(kind, {})
        previous = {name: value for name, value in before.get(kind, {}).items() if name in facts}
        if kind == "inputs":
            result += _mapping_differences("input", _flatten(previous), _flatten(facts))
        else:
            result += _mapping_differences("data", previous, facts)

    return result


def _code_differences(store: "Store", before: Facts, now: Facts) -> Iterator[Difference]:
    identities = str(before.get("code", "")), now["code"]
    if any(identity.startswith(code.IMAGE_DIGEST) for identity in identities):
        yield Difference("image", "digest", *identities)
        return

    try:
        recorded = validate(CodeFile, store.get(f"{CODE_FOLDER}{identities[0]}")).model_dump()
        current = code.identity_facts(modules_of(now))
        files = list(_mapping_differences("code", recorded["files"], current["files"]))
        packages = (
            dict(name.rpartition("-")[::2] for name in facts["packages"])
            for facts in (recorded, current)
        )
        files += _mapping_differences(
            "code", *({f"package {n}": v for n, v in versions.items()} for versions in packages)
        )

        if recorded["python"] != current["python"]:
            files.append(Difference("code", "Python", recorded["python"], current["python"]))
    # the list of files is missing, because an earlier version of Rekindle recorded only the hash
    except (NotFound, StorageError, ValueError):
        files = []

    yield from files or [Difference("code", "all files", *identities)]


def _mapping_differences(
    kind: str, recorded: dict[str, Any], now: dict[str, Any]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*recorded, *now]):
        if recorded.get(name, MISSING) != now.get(name, MISSING):
            yield Difference(
                kind, name, str(recorded.get(name, MISSING)), str(now.get(name, MISSING))
            )


def _flatten(inputs: dict[str, str], prefix: str = "") -> dict[str, str]:
    """Replace an input whose text is a JSON object by one entry per key, such as `train.epochs`
    instead of `train`."""
    result: dict[str, str] = {}

    for name, text in inputs.items():
        value: object = text
        if isinstance(text, str) and text[:1] == "{":
            with suppress(ValueError, TypeError):
                value = loads(text)

        if isinstance(value, dict) and value:
            result.update(_flatten(value, f"{prefix}{name}."))
        else:
            result[f"{prefix}{name}"] = value if isinstance(value, str) else to_json(value)

    return result

"""Compare the facts of two cache keys, to explain why a step does not reuse an earlier result.

The fact `code` is one hash of many files. The object `cache-code/HASH` lists the hashed files, once
for all cache entries with this hash.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import loads, to_json
from rekindle.cache import code, entries
from rekindle.cache.key import Facts, list_modules
from rekindle.documents import Document, parse_and_validate
from rekindle.errors import Conflict, NotFound, StorageError
from rekindle.names import Digest

if TYPE_CHECKING:
    from rekindle.storage import Store

CODE_FOLDER = "cache-code/"
MISSING_VALUE = "missing"


@dataclass(frozen=True)
class Difference:
    """A fact of a cache key that has changed. `kind`: code, image, input, data or upstream; `name`:
    the changed module, config key, URI, artifact or task."""

    kind: str
    name: str
    before: str = ""
    now: str = ""


class CodeFile(Document):
    """The content of the object `cache-code/HASH`: the values that HASH was computed from."""

    python: str
    packages: list[str]
    files: dict[str, str]


def record_code(store: "Store", step_facts: Facts) -> None:
    """Store the list of files that the code's identity was computed from, unless the identity is
    the digest of an image. Raises StorageError."""
    if not step_facts["code"].startswith(code.IMAGE_DIGEST):
        with suppress(Conflict):
            store.put(
                f"{CODE_FOLDER}{step_facts['code']}",
                to_json(code.identity_facts(list_modules(step_facts))).encode(),
                if_absent=True,
            )


def remove_unused_code(store: "Store") -> None:
    """Delete the lists of code files that no cache entry refers to. Raises StorageError."""
    used_keys = {
        f"{CODE_FOLDER}{cache_entry.facts.get('code')}"
        for cache_entry in entries.read_entries(store)
    }
    unused_keys = (
        code_object.key
        for code_object in store.list(CODE_FOLDER)
        if code_object.key not in used_keys
    )
    store.delete([key for key in unused_keys if Digest.matches(key.removeprefix(CODE_FOLDER))])


def list_differences(store: "Store", facts_before: Facts, current_facts: Facts) -> list[Difference]:
    """List the differences between the facts of two cache keys, most relevant first. Inputs and
    data that `current_facts` does not contain are ignored."""
    if facts_before.get("code") != current_facts["code"]:
        all_differences = list(_find_code_differences(store, facts_before, current_facts))
    else:
        all_differences = []

    for facts_kind in ("inputs", "data_read", "artifacts"):
        current_values = current_facts.get(facts_kind, {})
        previous_values = {
            name: value
            for name, value in facts_before.get(facts_kind, {}).items()
            if name in current_values
        }
        if facts_kind == "inputs":
            all_differences += _compare_mappings(
                "input", _flatten_inputs(previous_values), _flatten_inputs(current_values)
            )
        else:
            all_differences += _compare_mappings("data", previous_values, current_values)

    return all_differences


def _find_code_differences(
    store: "Store", facts_before: Facts, current_facts: Facts
) -> Iterator[Difference]:
    code_identities = str(facts_before.get("code", "")), current_facts["code"]
    if any(code_identity.startswith(code.IMAGE_DIGEST) for code_identity in code_identities):
        yield Difference("image", "digest", *code_identities)
        return

    try:
        recorded_code = parse_and_validate(
            CodeFile, store.get(f"{CODE_FOLDER}{code_identities[0]}")
        ).model_dump()
        current_code = code.identity_facts(list_modules(current_facts))
        file_differences = list(
            _compare_mappings("code", recorded_code["files"], current_code["files"])
        )
        package_versions = (
            dict(name.rpartition("-")[::2] for name in code_facts["packages"])
            for code_facts in (recorded_code, current_code)
        )
        file_differences += _compare_mappings(
            "code",
            *(
                {
                    f"package {package}": package_version
                    for package, package_version in versions_by_package.items()
                }
                for versions_by_package in package_versions
            ),
        )

        if recorded_code["python"] != current_code["python"]:
            file_differences.append(
                Difference("code", "Python", recorded_code["python"], current_code["python"])
            )
    # an earlier version of Rekindle recorded only the hash, not the list of files
    except (NotFound, StorageError, ValueError):
        file_differences = []

    yield from file_differences or [Difference("code", "all files", *code_identities)]


def _compare_mappings(
    difference_kind: str, recorded_values: dict[str, Any], current_values: dict[str, Any]
) -> Iterator[Difference]:
    for key in dict.fromkeys([*recorded_values, *current_values]):
        if recorded_values.get(key, MISSING_VALUE) != current_values.get(key, MISSING_VALUE):
            yield Difference(
                difference_kind,
                key,
                str(recorded_values.get(key, MISSING_VALUE)),
                str(current_values.get(key, MISSING_VALUE)),
            )


def _flatten_inputs(input_texts: dict[str, str], name_prefix: str = "") -> dict[str, str]:
    """Replace an input whose text is a JSON object by one entry per key, such as `train.epochs`
    instead of `train`."""
    flat_texts: dict[str, str] = {}

    for input_name, input_text in input_texts.items():
        parsed_value: object = input_text
        if isinstance(input_text, str) and input_text[:1] == "{":
            with suppress(ValueError, TypeError):
                parsed_value = loads(input_text)

        if isinstance(parsed_value, dict) and parsed_value:
            flat_texts.update(_flatten_inputs(parsed_value, f"{name_prefix}{input_name}."))
        else:
            flat_texts[f"{name_prefix}{input_name}"] = (
                parsed_value if isinstance(parsed_value, str) else to_json(parsed_value)
            )

    return flat_texts

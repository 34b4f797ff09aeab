"""An outdated result is never reused from the cache, and a change without effect on the result
causes no new computation."""

import random
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import project
from rekindle.cache import code
from rekindle.cache.key import (
    UnknownKey,
    collect_facts,
    compute_cache_key,
    data_digest,
    describe_files,
)
from rekindle.errors import ConfigError
from rekindle.step import load_step_module, parse_inputs
from rekindle.storage import Store

STEP = '''
"""Sums."""
from pydantic import Field
from rekindle import Reuse, StepInputs, StepOutputs
from steps import {name}_helper
REUSE = Reuse(ignored_inputs=("workflow",), data_read=lambda inputs: [inputs.source])

class Inputs(StepInputs):
    source: str = Field(description="file")
    workflow: str = Field(description="name")
    rate: float = Field(0.5, description="number")
    table: dict[str, int] = Field(default_factory=dict, description="numbers")

class Outputs(StepOutputs):
    total: int = Field(description="sum")

def run(inputs):
    import steps.{name}_late
    return Outputs(total=1)
'''


class World:
    """A project with one step, and everything that the cache key of the step may depend on."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        (folder / "steps").mkdir(exist_ok=True)

        self.texts = {
            f"steps/{name}.py": STEP.format(name=name),
            f"steps/{name}_helper.py": "VALUE = 0\n",
            f"steps/{name}_late.py": "VALUE = 0\n",
            f"steps/{name}_other.py": "VALUE = 0\n",
            "data.csv": "0\n",
            "other.csv": "0\n",
        }

        self.inputs = {"rate": "0.5", "table": '{"a": 1, "b": 2}', "workflow": "w-1"}
        self.image = ""
        self.artifact = "0"

    def key(self) -> str:
        for path, text in self.texts.items():
            (self.folder / path).write_text(text)
        for remembered in (code._compute_digest, code._hash_file, code._list_imports):
            # clear the cached hashes; otherwise this process would keep the hashes of the earlier
            # code
            remembered.cache_clear()
        module = f"steps.{self.name}"
        inputs = parse_inputs(
            load_step_module(module).Inputs, self.inputs | {"source": str(self.folder / "data.csv")}
        )
        return compute_cache_key(
            collect_facts(module, inputs, {"model": self.artifact}, self.image)
        )

    def change(self, chance: random.Random) -> bool:
        """Make one random change; return True if the change may affect the outputs."""
        kind = chance.choice(
            [
                "code",
                "late",
                "other",
                "data",
                "file",
                "rate",
                "table",
                "workflow",
                "order",
                "image",
                "artifact",
            ]
        )

        number = chance.random()
        name = self.name

        match kind:
            case "code" | "late" | "other":
                module = {
                    "code": f"{name}_helper",
                    "late": f"{name}_late",
                    "other": f"{name}_other",
                }[kind]
                self.texts[f"steps/{module}.py"] = f"VALUE = {number}\n"
                return kind != "other" and not self.image
            case "data" | "file":
                self.texts["data.csv" if kind == "data" else "other.csv"] = f"{number}\n"
                return kind == "data"
            case "rate":
                self.inputs["rate"] = str(number)
            case "table":
                self.inputs["table"] = f'{{"a": {chance.randrange(10**9)}, "b": 2}}'
            case "workflow":
                self.inputs["workflow"] = f"w-{number}"
                return False
            # the same settings as JSON, with other spaces
            case "order":
                self.inputs["table"] = self.inputs["table"].replace(" ", "")
                return False
            case "image":
                self.image = "" if self.image else f"sha256:{number}"
            case _:
                self.artifact = str(number)

        return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path))
    search_path = sys.path[:]
    yield World(tmp_path, f"sums_{tmp_path.name}".replace("-", "_"))
    sys.path[:] = search_path


@pytest.mark.parametrize("changes", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_key_changes_exactly_with_code_inputs_data_or_image(world: World, changes: int) -> None:
    chance = random.Random(19)
    previous = world.key()
    kept_count = 0
    for number in range(changes):
        differs = world.change(chance)
        current = world.key()
        assert (current != previous) == differs, number
        kept_count += current == previous
        previous = current
    assert 0.2 < kept_count / changes < 0.8


def test_unverifiable_data_raises_instead_of_giving_a_key(tmp_path: Path) -> None:
    for uri in (str(tmp_path / "missing"), "https://example.com/data.csv"):
        with pytest.raises(UnknownKey):
            data_digest(uri)
    with pytest.raises(UnknownKey, match="path in the pod"):
        data_digest(str(tmp_path), is_this_machine=False)
    assert data_digest("simulate://7") == "simulate://7"


def test_the_key_of_a_training_does_not_depend_on_the_code_of_the_evaluation() -> None:
    names = set(code.imported_files(["steps.train", "steps.digits"], project.search_path()))
    assert {
        "steps.train",
        "steps.digits",
        "rekindle.training.loop",
        "rekindle.training.sampler",
    } <= names

    assert not {
        name
        for name in names
        if name.startswith(("rekindle.cli", "rekindle.local", "rekindle.blocks"))
    }

    assert not {"steps.evaluate", "steps.release", "rekindle.cache.key"} & names


def test_the_digest_of_a_folder_covers_names_and_bytes_of_its_files(tmp_path: Path) -> None:
    def folder_digest(**texts: str) -> dict[str, Any]:
        folder = tmp_path / uuid.uuid4().hex
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return describe_files(folder)

    files = folder_digest(a="12", **{"deep/b": "345"})
    assert files == folder_digest(**{"deep/b": "345"}, a="12")
    assert files["files"] == 2
    assert files["bytes"] == 5

    other_digests = [
        folder_digest(a="12", **{"deep/c": "345"}),
        folder_digest(a="13", **{"deep/b": "345"}),
        folder_digest(a="12"),
    ]

    assert len({other["sha256"] for other in [files, *other_digests]}) == 4
    file = tmp_path / "file"
    file.write_text("12")
    assert describe_files(file)["files"] == 1
    assert describe_files(file)["bytes"] == 2
    assert data_digest(str(file)) == data_digest(f"file://{file}") == describe_files(file)["sha256"]


def test_the_digest_of_a_folder_covers_linked_folders_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "large/.parts").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/2026").symlink_to(tmp_path / "large")
    part = tmp_path / "large/.parts/.a"
    part.write_text("12")
    earlier_files = describe_files(tmp_path / "data")
    part.write_text("13")
    assert earlier_files["files"] == 1
    assert earlier_files["bytes"] == 2
    assert describe_files(tmp_path / "data")["sha256"] != earlier_files["sha256"]


def link_twice(folder: Path, levels: int) -> Path:
    """Create a chain of folders, each with two links to the next folder; return the first
    folder."""
    for level in range(levels):
        (folder / f"{level}").mkdir(parents=True)
        for name in ("a", "b"):
            (folder / f"{level}" / name).symlink_to(folder / f"{level + 1}")

    (folder / f"{levels}").mkdir()
    (folder / f"{levels}/file.py").touch()
    (folder / f"{levels}/loop").symlink_to(folder / "0")
    return folder / "0"


def test_links_that_multiply_the_paths_of_a_folder_are_an_error(tmp_path: Path) -> None:
    data = link_twice(tmp_path / "few", 3)
    assert describe_files(data)["files"] == 2**3
    data = link_twice(tmp_path / "many", 12)
    with pytest.raises(ConfigError, match=r"many/\d+ is reached over more than 1,000 links"):
        data_digest(str(data))


def test_links_that_multiply_the_files_of_a_package_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = link_twice(tmp_path / "many", 12).rename(tmp_path / "workload")
    (package / "__init__.py").touch()
    monkeypatch.setenv(project.PATH_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="over more than 1,000 links"):
        code.code_identity(["workload"])


def test_the_digest_of_objects_in_a_store_covers_their_listing(s3: Store) -> None:
    prefix = uuid.uuid4().hex
    uri = f"s3://{s3.bucket}/{prefix}/"
    with pytest.raises(UnknownKey, match="does not exist"):
        data_digest(uri)

    s3.put(f"{prefix}/a", b"1")
    seen = [data_digest(uri)]
    assert data_digest(uri, is_this_machine=False) == seen[0], "a bucket can be read from anywhere"

    for name, data in (("a", b"2"), ("b", b"1")):
        s3.put(f"{prefix}/{name}", data)
        seen.append(data_digest(uri))
        s3.put(f"{prefix}-copy/{name}", data)

    assert len(set(seen)) == 3
    assert data_digest(f"s3://{s3.bucket}/{prefix}-copy/") == seen[2]
    asked: list[str] = []

    def bucket(name: str) -> Store:
        asked.append(name)
        return s3

    assert data_digest(f"s3://elsewhere/{prefix}/", open_bucket=bucket) == seen[-1]
    assert asked == ["elsewhere"]


@pytest.mark.parametrize("sign", ["#", "?"])
def test_the_digest_is_of_the_object_with_the_whole_key(s3: Store, sign: str) -> None:
    prefix = uuid.uuid4().hex
    s3.put(f"{prefix}/a", b"another object")
    s3.put(f"{prefix}/a{sign}b", b"1")
    uri = s3.uri(f"{prefix}/a{sign}b")
    earlier_digest = data_digest(uri)
    s3.put(f"{prefix}/a{sign}b", b"2")
    assert data_digest(uri) != earlier_digest


def test_a_key_covers_the_step_its_code_inputs_artifacts_and_data(world: World) -> None:
    world.key()
    module = f"steps.{world.name}"
    data = world.folder / "data.csv"
    inputs = parse_inputs(load_step_module(module).Inputs, world.inputs | {"source": str(data)})
    computed = collect_facts(module, inputs, {"model": "abc"}, "sha256:1")

    assert computed == {
        "step": module,
        "code": "sha256:1",
        "inputs": {"source": str(data), "rate": "0.5", "table": '{"a": 1, "b": 2}'},
        "artifacts": {"model": "abc"},
        "data_read": {str(data): describe_files(data)["sha256"]},
    }

    assert (
        compute_cache_key(computed)
        == compute_cache_key(dict(reversed(computed.items())))
        != compute_cache_key(computed | {"code": "sha256:2"})
    )

    assert collect_facts(module, inputs, {})["code"] == code.code_identity([module])

    with pytest.raises(UnknownKey, match="path in the pod"):
        collect_facts(module, inputs, {}, "sha256:1", is_this_machine=False)


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/rows",
        "postgresql://host/db",
        "hf://org/set",
        "https://h/x",
        "1a://x",
        "a+b://x",
    ],
)
def test_data_of_an_unknown_service_is_never_taken_for_unchanged(uri: str) -> None:
    with pytest.raises(UnknownKey, match="it cannot be verified that"):
        data_digest(uri)
    assert data_digest("simulate://7") == "simulate://7"

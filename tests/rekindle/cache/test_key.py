"""Nothing stale is ever taken, and nothing is computed again for a change that cannot matter."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import project
from rekindle.cache import code
from rekindle.cache.key import Unknown, content, facts, key
from rekindle.step import load, parse

STEP = '''
"""Sums."""
from pydantic import Field
from rekindle import Reuse, StepInputs, StepOutputs
from steps import {name}_helper
REUSE = Reuse(aside=("workflow",), reads=lambda inputs: [inputs.source])

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
    """A project with one step, and everything that its key may depend on."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
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
        self.image, self.artifact = "", "0"

    def key(self) -> str:
        for path, text in self.texts.items():
            (self.folder / path).write_text(text)
        for remembered in (code._digest, code._sha256, code._imports):
            remembered.cache_clear()  # a process keeps the code that it has
        module = f"steps.{self.name}"
        inputs = parse(load(module).Inputs, self.inputs | {"source": str(self.folder / "data.csv")})
        return key(facts(module, inputs, {"model": self.artifact}, self.image))

    def change(self, chance: random.Random) -> bool:
        """One random change; whether the outputs may differ by it."""
        what, number = (
            chance.choice(
                ["code", "late", "other", "data", "file", "rate", "table", "workflow", "order", "image", "artifact"]
            ),
            chance.random(),
        )
        name = self.name
        match what:
            case "code" | "late" | "other":
                module = {"code": f"{name}_helper", "late": f"{name}_late", "other": f"{name}_other"}[what]
                self.texts[f"steps/{module}.py"] = f"VALUE = {number}\n"
                return what != "other" and not self.image
            case "data" | "file":
                self.texts["data.csv" if what == "data" else "other.csv"] = f"{number}\n"
                return what == "data"
            case "rate":
                self.inputs["rate"] = str(number)
            case "table":
                self.inputs["table"] = f'{{"a": {chance.randrange(10**9)}, "b": 2}}'
            case "workflow":
                self.inputs["workflow"] = f"w-{number}"
                return False
            case "order":  # the same table, written otherwise
                before = self.inputs["table"]
                self.inputs["table"] = before.replace(" ", "")
                return False
            case "image":
                self.image = "" if self.image else f"sha256:{number}"
            case _:
                self.artifact = str(number)
        return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(project.PATH, str(tmp_path))
    before = sys.path[:]
    yield World(tmp_path, f"sums_{tmp_path.name}".replace("-", "_"))
    sys.path[:] = before


def test_a_thousand_changes_of_code_inputs_data_and_image(world: World) -> None:
    chance = random.Random(19)
    before, kept = world.key(), 0
    for number in range(1000):
        differs = world.change(chance)
        now = world.key()
        assert (now != before) == differs, number
        kept += now == before
        before = now
    assert 200 < kept < 800


def test_what_nobody_can_know_gives_no_key(tmp_path: Path) -> None:
    for uri in (str(tmp_path / "away"), "https://example.com/data.csv"):
        with pytest.raises(Unknown):
            content(uri)
    with pytest.raises(Unknown, match="path of the pod"):
        content(str(tmp_path), here=False)
    assert content("simulate://7") == "simulate://7"


def test_the_training_of_the_reference_project_does_not_depend_on_what_evaluates_it() -> None:
    names = set(code.closure(["steps.train", "steps.digits"], project.search_path()))
    assert {"steps.train", "steps.digits", "rekindle.training.loop", "rekindle.training.sampler"} <= names
    assert not {name for name in names if name.startswith(("rekindle.cli", "rekindle.local", "rekindle.blocks"))}
    assert not {"steps.evaluate", "steps.release", "rekindle.cache.key"} & names

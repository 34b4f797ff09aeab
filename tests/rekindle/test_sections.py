"""Hints for wrong keys, whatever the model of a section or of a request is."""

from pydantic import BaseModel, ConfigDict

from rekindle.sections import Section, known_keys


class Tree(BaseModel):
    name: str
    left: "Tree | None" = None
    children: list["Tree"] = []


class Socket:
    """Nothing that JSON could describe."""


class Own(Section):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    rate: float = 1.0
    socket: Socket = Socket()


def test_the_keys_of_a_model_that_holds_itself_are_known_at_every_depth() -> None:
    for place in ((), ("left",), ("children", 3), ("children", 0, "left", "left")):
        assert known_keys(Tree, place) == {"name", "left", "children"}
    assert known_keys(Tree, ("name",)) == set()


def test_a_model_that_json_cannot_describe_has_no_hints() -> None:
    assert known_keys(Own, ()) == set()

"""Hints for wrong keys, for any model of a section or request."""

from pydantic import BaseModel, ConfigDict

from rekindle.sections import Section, known_keys


class Tree(BaseModel):
    name: str
    child: "Tree | None" = None
    children: list["Tree"] = []


class Socket:
    """A type without a JSON schema."""


class WithSocket(Section):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    rate: float = 1.0
    socket: Socket = Socket()


def test_known_keys_of_a_recursive_model_work_at_every_depth() -> None:
    for path in ((), ("child",), ("children", 3), ("children", 0, "child", "child")):
        assert known_keys(Tree, path) == {"name", "child", "children"}
    assert known_keys(Tree, ("name",)) == set()


def test_a_model_without_a_json_schema_has_no_known_keys() -> None:
    assert known_keys(WithSocket, ()) == set()

"""Paths select the same values as Argo's library (evilmonkeyinc/jsonpath v0.8.1); unsupported paths
are rejected."""

from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.language.json_path import PathError, select_values
from argolocal.runner.cluster import LocalCluster
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow

DATA: dict[str, Any] = {
    "people": [
        {"name": "Ann", "age": 43, "tags": ["a", "b"]},
        {"name": "Mo", "age": 42},
        {"name": "Jai", "age": 44, "x": None},
    ],
    "z": {"b": 1, "a": [1, 2, 3], "length": 7},
    "s": "é",
    "odd key": 3,
    "a-b": 4,
    "none": None,
    "e": [],
}
MISSING = object()
RESULTS = [
    ("$.z.b", 1),
    ("$['odd key']", 3),
    ("$.a-b", 4),
    ("$.z.a[-1]", 3),
    ("$.z.a[5]", MISSING),
    ("$.z[0]", MISSING),
    ("$.people.name", MISSING),
    ("$.none", None),
    ("$.none.x", MISSING),
    ("$.missing", MISSING),
    ("$.people.length", 3),
    ("$.z.length", 7),
    ("$.s.length", 2),
    ("$.z.*", [[1, 2, 3], 1, 7]),
    ("$.z.a[*]", [1, 2, 3]),
    ("$.s[*]", MISSING),
    ("$.e[*]", []),
    ("$.people[*].name", ["Ann", "Mo", "Jai"]),
    ("$.people[*].tags[0]", ["a"]),
    ("$.people[*].x", []),
    ("$.people[*].missing", []),
    ("$.people[*].*", [[43, "Ann", ["a", "b"]], [42, "Mo"], [44, "Jai", None]]),
    ("$.people[0:1].name", ["Ann"]),
    ("$.z.a[1:]", [2, 3]),
    ("$.z.a[-2:]", [2, 3]),
    ("$.z.a[::-1]", [3, 2, 1]),
    ("$.z.a[2:0:-1]", []),
    ("$.z.a[1:][0]", 2),
    ("$.z[0:1]", MISSING),
    ("$.people[?(@.age>42 && @.age<44)].name", ["Ann"]),
    ('$.people[?(@.name=="Ann")][0].age', 43),
    ("$.people[?(@.tags)].name", ["Ann"]),
    ("$.people[?(@.x)]", []),
    ("$.people[?(@.x==null)].name", ["Jai"]),
    ("$.people[?(@.x!=null)].name", []),
    ("$.people[?(@.age && @.name=='Mo')]", []),
    ("$.people[?(@.name > 'B')]", []),
    ("$.people[?(@['age']!=43)].name", ["Mo", "Jai"]),
    ("$.z.a[?(@>1)]", [2, 3]),
    ("$.z[?(@==7)]", [7]),
    ("$.people[?(@.age=='42')]", []),
    ("$.people[?(@.name=='Mo' || @.age >= 44)].age", [42, 44]),
]


@pytest.mark.parametrize(("path", "value"), RESULTS, ids=[path for path, _ in RESULTS])
def test_a_path_selects_the_same_values_as_on_argo(path: str, value: Any) -> None:
    if value is MISSING:
        with pytest.raises(PathError):
            select_values(DATA, path)
    else:
        assert select_values(DATA, path) == value


@pytest.mark.parametrize(
    "path",
    [
        "z",
        "$z",
        "$.",
        "$..name",
        "$.z[0,1]",
        "$.z[(@.length-1)]",
        "$[?(@.n + 1 == 2)]",
        "$[?(!@.n)]",
        "$[?(@.a =~ /x/)]",
        "$[?(@.pinned)]",
        "$[?(@.a in [1])]",
        "$[?()]",
        "$[?(@.a ==)]",
        "$[?(@.a == 1 &&)]",
    ],
)
def test_an_unsupported_path_is_rejected_before_the_run_starts(path: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="not supported"):
        select_values(DATA, path)
    echo = {"image": "busybox", "command": ["echo", f'{{{{=jsonpath(workflow.name, "{path}")}}}}']}
    with pytest.raises(
        ConfigError, match=r"templates\[0\]\.container\.command\[1\].*not supported"
    ):
        execute_manifest(
            make_workflow({"name": "main", "container": echo}), {}, LocalCluster(tmp_path)
        )

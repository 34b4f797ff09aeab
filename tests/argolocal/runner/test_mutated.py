"""Tests of broken manifests: a mistake must result in one clear sentence before the run, never in a
traceback or a hang."""

import copy
import functools
import json
import math
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
from argolocal.engine.scheduler import Scheduler
from argolocal.errors import ConfigError
from argolocal.manifest.read import parse_objects, read_path
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.state.locks import SharedLocks
from tests.argolocal.runner.everything import EVERYTHING
from tests.conformance import recorded

DEEP_LIST: list[Any] = []
for _ in range(250):  # PyYAML needs three frames per level
    DEEP_LIST = [DEEP_LIST]
VALUES: list[Any] = [
    *(
        None,
        7,
        -1,
        0.5,
        True,
        10**30,
        -(2**63),
        1e308,
        math.nan,
        math.inf,
        [],
        {},
        [None],
        [[]],
        DEEP_LIST,
    ),
    *(
        "",
        "x",
        " ",
        "{{",
        "{{=",
        "{{=1/0}}",
        "{{inputs.parameters.no}}",
        "{{item}}",
        "{{tasks.a.outputs.result}}",
        "main",
    ),
    *(
        "1x",
        "9999999999h",
        "-1s",
        "1e400",
        "2024-01-01",
        "../../x",
        "/",
        "a/b",
        "\U0001f600",
        "\u202e",
        "\x00",
        "a" * 300,
    ),
    *(
        ["x"],
        {"x": 1},
        [{"name": None}],
        {"name": ["x"]},
        {"": ""},
        [{"name": "x"}, {"name": "x"}],
        "[1, 2",
        '{"a": 1}',
    ),
]
KEYS = [
    "nme",
    "template",
    "steps",
    "dag",
    "withItems",
    "withParam",
    "when",
    "depends",
    "inline",
    "templateRef",
    "suspend",
]
KEYS += [
    "",
    "\u00e9",
    "a b",
    "x" * 300,
    "resource",
    "hooks",
    "retryStrategy",
    "value",
    "valueFrom",
    "synchronization",
]


def make_yaml_bomb(levels: int) -> bytes:
    """Return YAML with nested lists, each with 9 references to the list before."""
    anchors = (
        b"&a%d [%s]" % (i, b",".join([b"*a%d" % (i - 1) if i else b"x"] * 9)) for i in range(levels)
    )
    return b"[" + b",".join(anchors) + b"]"


# (edit of the text, words of the error or "")
TEXTS: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: data[: len(data) // 2], "did not find expected ',' or '}'"),
    (lambda data: data.replace(b"name", b"\xff\xfe", 1), "cannot be read"),
    (lambda data: data.replace(b"  ", b"\t", 1), "cannot start any token"),
    (lambda data: b"\xef\xbb\xbf" + data, ""),
    (lambda data: data + b"\x00", "the character '\\x00' is not allowed"),
    (lambda data: data + b"\n---\n" + data, "2 objects"),
    (lambda data: data + b"\nkind: Workflow\nspec: {}\n", 'the key "kind" is duplicated'),
    (
        lambda data: data.replace(b"[1, {k: v}, [2]]", make_yaml_bomb(9), 1),
        "more than 200,000 values",
    ),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  podGC: " + make_yaml_bomb(6), 1),
        "more than 200,000 values",
    ),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  podGC: " + b"[" * 3000 + b"]" * 3000, 1),
        "more than 100 levels deep",
    ),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  podGC: " + b"{a: " * 300 + b"}" * 300, 1),
        "more than 100 levels deep",
    ),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  podGC: .nan\n  priority: " + b"9" * 5000, 1),
        "a number has 5,000 characters",
    ),
    (lambda data: data.replace(b"spec:", b"spec: &s\n  hooks: *s", 1), "*s contains itself"),
    (lambda data: data.replace(b"spec:", b"spec:\n  <<: *nobody", 1), "found undefined alias"),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  x: !!python/object/apply:os.getcwd []", 1),
        "could not determine a constructor for the tag",
    ),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  onExit: " + b"[" * 5000, 1),
        "more than 100 levels deep",
    ),
    (lambda data: data + b"# " + b"x" * (3 << 20), ""),
    (
        lambda data: data.replace(b"spec:", b"spec:\n  podGC: " + b"x" * (3 << 20), 1),
        "spec.podGC is str ('xxx",
    ),
    (lambda data: b"", "does not contain an object"),
    (lambda data: b"- 1", "each document must be a mapping"),
    (lambda data: b"kind: Workflow", "spec.entrypoint: the entrypoint is missing"),
    (lambda data: b"\x89PNG\r\n\x1a\n" + data, "cannot be read"),
]
ERROR = re.compile(
    r"(the manifest cannot run:\n)?"
    r"(\S+/w\.yaml(:| cannot be read)|the parameter |(kind|apiVersion|metadata|spec)[^\s:]*:? |.*"
    r" of the \w+ )"
)
# texts of Python errors
INTERNAL = re.compile(r"Traceback|object has no attribute|object is not|<class|unhashable|NoneType")
# maximum time to read a manifest and execute its workflow
CPU_TIMEOUT_S = 20


def list_fields(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in the nested lists and dicts of `value`."""
    if isinstance(value, dict):
        keys = list(value)
    else:
        if isinstance(value, list):
            keys = range(len(value))
        else:
            keys = []
    return [field for key in keys for field in ((value, key), *list_fields(value[key]))]


@functools.cache
def read_base_manifests() -> list[dict[str, Any]]:
    return [
        parse_objects(EVERYTHING)[0],
        *(parse_objects(recording.manifest)[0] for recording in recorded.read()),
    ]


@st.composite
def damaged_manifests(draw: st.DrawFn) -> bytes:
    """Draw a manifest with some damaged fields, and sometimes with damaged text."""
    manifest = copy.deepcopy(draw(st.sampled_from(read_base_manifests())))

    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(list_fields(manifest)))
        mutation = draw(
            st.sampled_from(["remove", "rename", "copy", "repeat", "set", "set", "splice"])
        )
        if mutation == "remove":
            del container[key]
        elif mutation == "rename" and isinstance(container, dict):
            container[draw(st.sampled_from([f"{key}s", str(key)[:-1], *KEYS]))] = container.pop(key)
        elif mutation == "copy":
            other, name = draw(st.sampled_from(list_fields(manifest)))
            container[key] = copy.deepcopy(other[name])
        elif mutation == "repeat" and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif mutation == "splice" and isinstance(container[key], str):
            position = draw(st.integers(0, len(container[key])))
            container[key] = (
                container[key][:position]
                + draw(st.sampled_from(["{{", "}}", "{{=", "'", '"', "&&", "\n", "-", "$("]))
                + container[key][position:]
            )
        else:
            container[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))

        if not list_fields(manifest):
            break

    as_json = draw(st.booleans())
    data = (
        json.dumps(manifest)
        if as_json
        else yaml.dump(manifest, Dumper=yaml.CSafeDumper, allow_unicode=True)
    ).encode()
    if draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(TEXTS))[0](data)

    return data


def play(scheduler: Scheduler) -> None:
    now = 1000.0
    events = []

    for _ in range(300):
        starts = [
            action for action in scheduler.advance(now, events) if isinstance(action, StartPod)
        ]
        if scheduler.done:
            return

        now = max(now + 1, scheduler.wake or 0.0)
        phases = ["Succeeded", "Failed", "Error"]

        events = [
            e
            for i, s in enumerate(starts)
            for e in (PodStarted(s.id), PodEnded(s.id, phases[i % 3], "", {"exitCode": "1"}))
        ]
    # the workflow may still be in progress because, as on Argo, it may retry for ever or wait for
    # its own lock


def load_error(data: bytes, home: Path) -> str:
    """Return the error of `rekindle run --manifest` before the start; execute the workflow on the
    state machine if it is valid."""
    file = home / "w.yaml"
    cluster = LocalCluster(home / "home")
    file.write_bytes(data)
    shared_locks = SharedLocks(cluster)

    try:
        manifest, other_objects = read_path(file)
        cluster.store_objects(other_objects)
        run = LocalRun.create(manifest, {}, cluster)
        run.files.close()
        assert run.files.root.parent == cluster.home / "runs"
        play(Scheduler(run.workflow, locks=shared_locks))
    except ConfigError as error:
        return str(error)
    finally:
        shared_locks.close()

    return ""


def check(data: bytes) -> str:
    """Return the error of a manifest, which must begin with the path of the wrong field; "" if the
    manifest runs."""

    def on_timeout(*_: Any) -> None:
        raise AssertionError("it hangs")

    old_handler = signal.signal(signal.SIGVTALRM, on_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_TIMEOUT_S)
    try:
        with tempfile.TemporaryDirectory() as home:
            message = load_error(data, Path(home))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old_handler)

    assert not message or (
        ERROR.match(message) and not INTERNAL.search(message) and len(message) < 4000
    ), message
    return message


QUICK_SETTINGS = settings(deadline=None, max_examples=200, derandomize=True, database=None)
SLOW_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
SOAK = settings(deadline=None, max_examples=5000, database=None, suppress_health_check=SLOW_CHECKS)


@QUICK_SETTINGS
@given(damaged_manifests())
def test_a_broken_manifest_runs_or_is_rejected_in_a_sentence(data: bytes) -> None:
    check(data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@SOAK
@given(damaged_manifests())
def test_five_thousand_broken_manifests_run_or_are_rejected_in_a_sentence(data: bytes) -> None:
    check(data)


@pytest.mark.parametrize("case_number", range(len(TEXTS)))
def test_a_broken_file_runs_or_is_rejected_in_a_sentence(case_number: int) -> None:
    spoil, words = TEXTS[case_number]
    message = check(spoil(EVERYTHING.encode()))
    assert words in message, message
    assert bool(words) == bool(message), message

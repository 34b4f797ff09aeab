"""A page that reads only the new lines of a journal shows the same status as a command that reads
the whole journal."""

import fcntl
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argolocal.errors import ConfigError
from argolocal.state import journal_reader
from argolocal.state.journal import JOURNAL_FILE, RunFiles
from argolocal.state.journal_reader import JournalReader
from tests.waiting import until

IDS = ("w", "w-1", "w-2")


def make_node(id: str, **fields: object) -> dict[str, Any]:
    return {
        "id": id,
        "name": id,
        "type": "Pod",
        "phase": "Running",
        "startedAt": "2026-01-01T00:00:00Z",
        **fields,
    }


nodes = st.builds(
    make_node,
    st.sampled_from(IDS),
    phase=st.sampled_from(["Pending", "Running", "Failed", "Done"]),
    children=st.lists(st.sampled_from(IDS), max_size=2),
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "status": st.fixed_dictionaries({"phase": st.sampled_from(["Running", "Failed", 3])}),
        "nodes": st.lists(nodes, max_size=2).map(
            lambda nodes: {node["id"]: node for node in nodes}
        ),
        "children": st.dictionaries(st.sampled_from(IDS), st.just(["w-1"]), max_size=1),
        "pods": st.dictionaries(
            st.sampled_from(IDS), st.sampled_from([None, [7, 99], ["x"]]), max_size=1
        ),
    },
)
texts = entries.map(lambda entry: json.dumps(entry) + "\n")
# an edit of the journal: bytes to append, a new file, or a shorter file
edits = st.one_of(
    st.tuples(
        st.just("append"), st.one_of(texts, texts.map(lambda text: text[:-5]), st.just("\n"))
    ),
    st.tuples(st.just("replace"), texts),
    st.tuples(st.just("cut"), st.integers(0, 200)),
    st.tuples(st.just("remove"), st.none()),
)


def read_nodes(reader: JournalReader) -> object:
    try:
        return reader.read()
    except ConfigError:
        return "corrupt"


def apply_edit(path: Path, edit: tuple[str, Any]) -> None:
    match edit:
        case ("append", text):
            with path.open("a") as file:
                file.write(text)
        case ("replace", text):
            draft = path.with_name("draft")
            draft.write_text(text)
            draft.replace(path)
        case ("cut", size) if path.exists():
            path.write_bytes(path.read_bytes()[:size])
        case ("remove", _):
            path.unlink(missing_ok=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(edits, max_size=12))
def test_new_lines_give_the_same_status_as_the_whole_journal(edits: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / JOURNAL_FILE
        path.write_text(
            json.dumps({"status": {"phase": "Running"}, "nodes": {"w": make_node("w")}}) + "\n"
        )
        reader = JournalReader(path)
        results: list[tuple[object, str]] = []

        for edit in edits:
            apply_edit(path, edit)
            result = read_nodes(reader)
            assert result == read_nodes(JournalReader(path))
            results.append((result, repr(result)))

        # a page may still render a status when the next lines are read
        assert all(repr(result) == text for result, text in results)


def test_only_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / JOURNAL_FILE
    path.write_text(json.dumps({"nodes": {"w": make_node("w")}}) + "\n")
    reader = JournalReader(path)
    reader.read()
    apply_edit(path, ("append", json.dumps({"nodes": {"w-1": make_node("w-1")}}) + "\n"))

    parsed: list[bytes] = []
    loads = journal_reader.loads_finite
    monkeypatch.setattr(
        journal_reader, "loads_finite", lambda line: parsed.append(line) or loads(line)
    )
    status, _ = reader.read()
    assert len(parsed) == 1
    assert list(status["nodes"]) == ["w", "w-1"]


def count_descriptors(file: Path) -> int:
    """Return the number of descriptors of this process that are open for a file."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        # the descriptor of the listing itself is closed
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{descriptor}") == str(file)
    return count


def test_a_page_that_looks_at_a_run_does_not_stop_it_from_starting(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, "w")
    files.root.mkdir(parents=True)
    probe = os.open(files.root / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(probe, fcntl.LOCK_SH)
    with ThreadPoolExecutor() as pool:
        start = pool.submit(files.lock)
        lock_file = files.root / "lock"
        until("the start of the run", lambda: count_descriptors(lock_file) > 1 or start.done())
        os.close(probe)
        start.result()
    files.close()


def test_pages_that_look_at_a_run_at_the_same_time_do_not_see_each_other(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, "w")
    files.root.mkdir(parents=True)
    files.lock()
    files.close()
    probe = os.open(files.root / "lock", os.O_RDWR)
    fcntl.flock(probe, fcntl.LOCK_SH)
    assert files.runner() is None
    os.close(probe)

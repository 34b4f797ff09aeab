"""Read and write recorded.jsonl, the workflows that a real Argo ran: one JSON line for each
workflow, with its manifest (YAML) and its outcome."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.conformance.outcome import Outcome

FILE = Path(__file__).with_name("recorded.jsonl")


@dataclass(frozen=True)
class Recording:
    name: str
    manifest: str
    outcome: Outcome


def read() -> list[Recording]:
    """Return all recordings, sorted by name."""
    with FILE.open() as lines:
        return [Recording(**json.loads(line)) for line in lines]


def write(recordings: Iterable[Recording]) -> None:
    """Replace the file recorded.jsonl. The lines of recorded.jsonl are sorted by name to keep diffs
    small."""
    ordered = sorted(recordings, key=lambda recording: recording.name)
    FILE.write_text(
        "".join(json.dumps(asdict(recording), ensure_ascii=False) + "\n" for recording in ordered)
    )

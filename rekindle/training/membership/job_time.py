"""The times of a training job: when the job could be created, and how long it has trained already.

A coordinator that replaces an earlier coordinator of the same job continues to count the trained
time of the earlier coordinators, so that the time limit of the training does not start again. The
trained time is in the events `trained` of the ledger.
"""

import os
from datetime import datetime
from typing import TYPE_CHECKING

from rekindle.errors import write_stderr
from rekindle.kubernetes_names import REKINDLE_CREATED
from rekindle.training.ledger.events import parse_events

if TYPE_CHECKING:
    from rekindle.storage import Store

TRAINED_EVENT = "trained"
# seconds of training between two events `trained`
TRAINED_INTERVAL_S = 10.0


def read_creation_time() -> float | None:
    """Return the time from which on the job could be created, in Unix seconds; None if the
    environment does not contain the time."""
    times_text = os.environ.get(REKINDLE_CREATED, "")
    if not times_text:
        return None
    try:
        return max(datetime.fromisoformat(text).timestamp() for text in times_text.split(","))
    except (ValueError, OverflowError):
        write_stderr(
            f"{REKINDLE_CREATED} is {times_text[:100]!r}: it must contain RFC 3339 times with time"
            " zones, separated by commas. The time in the queue before the first start is not"
            " counted."
        )
        return None


def read_trained_seconds(store: "Store", ledger_prefix: str) -> float:
    """Return the seconds that the earlier coordinators of the job have trained; 0 after the end of
    a run, because a run that failed may be resumed with the full limit. Raises StorageError."""
    segment_keys = sorted(
        segment_entry.key
        for segment_entry in store.list(f"{ledger_prefix}/")
        if segment_entry.key.endswith(".jsonl")
    )
    # read the newest segment of the ledger first, since a ledger may be large
    for segment_key in reversed(segment_keys):
        for event in reversed(parse_events(store.get(segment_key))):
            if event["event"] == TRAINED_EVENT:
                return float(event["seconds"])
            if event["event"] in ("verdict", "complete"):
                return 0.0
    return 0.0

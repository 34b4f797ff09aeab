"""Fuzz the readers of documents: a reader returns a document that can be written and read again, or
raises one short error."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from argolocal.common.json_text import loads
from rekindle.blocks.manifest.quoting import quote_argument, quote_in_json, quote_word
from rekindle.cache.claims import Claims
from rekindle.cache.entries import EntryFile, IndexFile
from rekindle.cache.lookup import reused_tasks
from rekindle.documents import DatasetFile, InvalidDocument, ModelFile, parse
from rekindle.release.origin import CurveFile, RunFile
from rekindle.release.promotion import PromotionFile
from rekindle.release.release_files import ReleaseOwner, ReleaseRecord, Verdict
from rekindle.release.retention.ownership import RunMark
from rekindle.release.watch.drift import DriftState, Reference
from rekindle.training.sweep.records import SweepDecision, TrialValidation, UsedSecondsRecord
from steps.monitoring.moving_window import parse_time
from tests.fuzz.mutation import change, mutate_bytes
from tests.rekindle.valid_documents import (
    DRIFT,
    ENTRY,
    HISTOGRAMS,
    KEY,
    MARK,
    PROMOTION,
    RELEASE,
    STUDY,
)

Case = Callable[[random.Random], None]
DOCUMENTS: list[tuple[type[BaseModel], Any]] = [
    *(
        (ReleaseRecord, RELEASE["release.json"]),
        (ReleaseOwner, RELEASE["release.json"]),
        (ModelFile, RELEASE["model.json"]),
    ),
    *(
        (RunFile, RELEASE["origin.json"]),
        (CurveFile, RELEASE["curve.json"]),
        (DatasetFile, RELEASE["dataset.json"]),
    ),
    *(
        (Verdict, RELEASE["verdict.json"]),
        (PromotionFile, PROMOTION),
        (EntryFile, ENTRY),
        (RunMark, MARK),
        (DriftState, DRIFT),
    ),
    *((IndexFile, {KEY: ["etag", ENTRY]}), (Claims, {"shop/train": 5.0}), (Reference, HISTOGRAMS)),
    *(
        (SweepDecision, STUDY["jobs/00000.json"]),
        (UsedSecondsRecord, STUDY["seconds/1.json"]),
        (TrialValidation, {"loss": 0.5}),
    ),
]
TIMES = [b"2026-01-01T00:00:00+00:00", b"0001-01-01T00:00:00Z", b"9999-12-31T23:59:59-23:59"]
VALUES = [b"x", b"a b", b"{{x}}", b"'", b'"', b"$(A)", b"\\", b"\n", b"=a", b"a' || 'b"]
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def stored_documents(_folder: Path) -> Case:
    """Return a case that reads a changed document of the object store."""
    seeds = [json.dumps(document).encode() for _, document in DOCUMENTS]

    def case(rng: random.Random) -> None:
        model, document = rng.choice(DOCUMENTS)
        for _ in range(rng.randrange(4)):
            document = change(document, rng)

        data = json.dumps(document).encode()
        if rng.random() < 0.4:
            data = mutate_bytes(data, rng, seeds)

        try:
            parsed_document = parse(model, data, "s3://b/document")
        except InvalidDocument as error:
            assert not CONTROLS.search(str(error)), repr(error)
            assert len(str(error)) < 10_000, repr(error)
            return

        written_json = json.dumps(parsed_document.model_dump())
        assert (
            json.dumps(parse(model, written_json, "s3://b/document").model_dump()) == written_json
        )
        for key in parsed_document.files if isinstance(parsed_document, ReleaseRecord) else ():
            assert Path("/release", key).resolve().is_relative_to("/release"), key

        if isinstance(parsed_document, EntryFile):
            assert parsed_document.at.count("/") == 1
            assert "{{" not in "".join(parsed_document.outputs.values())

    return case


def parameters(_folder: Path) -> Case:
    """Return a case that reads parameters of a workflow, reads times in tags, and quotes values for
    manifests."""
    cached_rows = json.dumps(
        {"prepare": {"task": "prepare", "at": "shop-1/prepare"}, "reuse": "yes"}
    ).encode()

    def case(rng: random.Random) -> None:
        cached_text = mutate_bytes(cached_rows, rng, [cached_rows]).decode(errors="replace")
        workflow_parameters = [{"name": "cached", "value": cached_text}]
        try:
            for reference in reused_tasks(
                {"spec": {"arguments": {"parameters": workflow_parameters}}}
            ).values():
                assert Path("/store", reference).resolve().is_relative_to("/store"), reference
        except InvalidDocument as error:
            assert not CONTROLS.search(str(error))

        time = parse_time(mutate_bytes(rng.choice(TIMES), rng, TIMES).decode(errors="replace"))
        assert time is None or (time.tzinfo and 1900 <= time.year < 9000)

        text = mutate_bytes(rng.choice(VALUES), rng, VALUES).decode(errors="replace")
        if "{{" not in text:
            assert quote_in_json({"a": text}) == {"a": text}
            assert quote_word(text) == text
            assert quote_argument(text) == text.replace("$", "$$")

        try:
            loads(text)
        except ValueError as error:
            assert len(str(error)) < 10_000

    return case

"""A valid document of each kind that the object store and folders contain."""

import hashlib
import json
from typing import Any

from rekindle.release import release_files
from rekindle.release.watch.scores import ZERO_COUNTS
from rekindle.training.sweep.sweep_config import Sweep

SHA256 = "ab" * 32
KEY = "cd" * 32
CONFIG = {
    "data": {"source": "rows.csv"},
    "cluster": {"image": "i", "pods": {"train": {"image": "j"}}},
    "sweep": {"space": {"model": {"hidden": [1]}}},
}
RELEASE: dict[str, Any] = {
    "release.json": {
        "name": "shop",
        "version": "1",
        "workload": "steps.shop",
        "model_sha256": SHA256,
        "run_id": "r1",
        "provenance": {"git_sha": "abc"},
    },
    "model.json": {
        "sha256": SHA256,
        "workload": "steps.shop",
        "family": "",
        "start": "releases/shop/0123456789ab",
        "digest": "d1",
        "step": 3,
        "model": {"hidden": 8},
        "train": {"seed": 1},
        "fingerprint": {"torch": "2"},
        "best": {"step": 1, "validation_loss": 0.5, "released": True},
    },
    "origin.json": {
        "parameters": {"config": json.dumps(CONFIG), "rows": "7"},
        "manifest": {
            "spec": {
                "arguments": {"parameters": [{"name": "rows", "value": "7"}]},
                "templates": [{"name": "a"}],
            }
        },
        "created": "2026-11-02T03:00:00Z",
        "champion": "1",
        "python": "3.12.1",
        "packages": ["torch-2.8.0"],
        "modules": ["steps.shop"],
        "code": {"steps.shop": SHA256},
    },
    "curve.json": [[1, 0.5], [2, 0.25]],
    "dataset.json": {"facts": {"data_until": "2024-03-01T00:00:00+00:00"}, "digest": "d1"},
    "verdict.json": {"rows": 5, "max_batch": 2},
}
LOADED = {
    name: hashlib.sha256(json.dumps(RELEASE[name]).encode()).hexdigest()
    for name in ("model.json", "dataset.json")
}
RELEASE["release.json"]["files"] = LOADED
HASH = release_files.compute_content_hash(LOADED)
ROLLBACK = {
    "version": "1",
    "deployment": "shop-1",
    "champion": "2",
    "replicas": 1,
    "decided": False,
}
PROMOTION = {
    "version": "2",
    "deployment": "shop-2",
    "former": "shop-1",
    "run_id": "r1",
    "rollback": ROLLBACK,
}
ENTRY: dict[str, Any] = {
    "key": KEY,
    "at": "shop-1/prepare",
    "outputs": {"rows": "7"},
    "artifacts": {"dataset": {"sha256": SHA256, "files": 1, "bytes": 5}},
    "facts": {
        "step": "steps.prepare",
        "code": SHA256,
        "inputs": {"rows": "7", "train": "{}"},
        "data_read": {"a": "b"},
    },
    "seconds": 1.5,
    "made": 1e9,
}
HISTOGRAMS = {"rows": 5, "scores": {"a": [1, *ZERO_COUNTS[1:]]}, "features": {"b": ZERO_COUNTS}}
DRIFT = {"version": "1", "workflow": "w", "before": {"p": HISTOGRAMS}, "seen": {}, "retrained": 5.0}
MARK = {
    "store": "s",
    "pipeline": "shop",
    "number": 1,
    "whole": False,
    "tasks": ["train"],
    "ended": 5.0,
}
SWEEP = Sweep.model_validate({"trials": 2, "rungs": 1, "space": {"model": {"hidden": [4, 8]}}})
STUDY: dict[str, Any] = {
    "jobs/00000.json": {
        "trial": 0,
        "rung": 0,
        "pod": 1,
        "settings": {"model.hidden": 4},
        "attrs": {"a": 1},
    },
    "jobs/00001.json": {"stop": {"limit": 1.0, "hours": 2.0, "expected": 3.0}},
    "seconds/1.json": {"0/0": 1.5},
    "trials/0/rung-0/model.json": RELEASE["model.json"],
    "trials/0/rung-0/validation.json": {"loss": 0.5, "step": 3},
}

"""Random changes of the demo's config, code, input and image: no outdated result is reused, and no
valid result is computed again."""

import random
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cache import code, entries, lookup
from rekindle.storage import Store
from tests.commands import ROOT

IMAGE = "registry.example.com/rekindle@sha256:"
# key of the config → its values, and the tasks whose results depend on it; if `prepare` changes,
# the result of `train` changes, too
SETTINGS: dict[str, tuple[list[Any], str]] = {
    "data.source": (
        [f"simulate://{seed}?cards=700&terminals=1400&days=91" for seed in (7, 8)],
        "prepare",
    ),
    "data.test_weeks": ([1, 2], "prepare"),
    "data.label_delay_days": ([5, 7], "prepare"),
    "model.width": ([32, 48], "train"),
    "model.layers": ([1, 2], "train"),
    "train.seed": ([1, 2], "train"),
    "train.epochs": ([4, 5], "train"),
    "train.learning_rate": ([0.003, 0.004], "train"),
    "train.virtual_workers": ([4, 8], "train"),
    "train.batch_size": ([8, 16], "train"),
    "train.workers": ([1, 2, 3], ""),
    "train.checkpoint_seconds": ([20, 30], ""),
    "gate.tolerance": ([0.01, 0.02], ""),
    "serve.port": ([8080, 9000], ""),
    "schedule.cron": (["0 3 * * 1", "0 4 * * 1"], ""),
    "cluster.retries": ([2, 3], ""),
    "cache.keep_days": ([30, 90], ""),
}
# file of the project → True if the workload imports the file
CODE = {
    "mine.py": ("from steps.fraud import *\nimport help_of_mine\n# {}\n", True),
    "help_of_mine.py": ("VALUE = {}\n", True),
    "stray.py": ("VALUE = {}\n", False),
}


OTHER_OUTPUTS = {"source_digest": "", "warnings": "[]", "unchanged": ""}  # of prepare


class Demo:
    """The demo with a workload of the project; each method that changes the demo makes a random
    choice."""

    def __init__(self, folder: Path, store: Store, seed: int) -> None:
        self.folder = folder
        self.store = store
        self.random = random.Random(seed)
        self.settings: dict[str, Any] = {name: values[-1] for name, (values, _) in SETTINGS.items()}
        self.versions = dict.fromkeys(CODE, 0)
        self.image = "ab" * 32
        self.on_cluster = False
        # everything that the recorded results depend on
        self.results: set[tuple[Any, ...]] = set()
        for name in CODE:
            self._write(name)

    def change(self) -> None:
        kind = self.random.choices(["config", "code", "image", "place"], [7, 1, 1, 1])[0]
        if kind == "config":
            name = self.random.choice(list(SETTINGS))
            self.settings[name] = self.random.choice(SETTINGS[name][0])
        elif kind == "code":
            name = self.random.choice(list(CODE))
            self.versions[name] = self.random.randrange(2)
            self._write(name)
        elif kind == "image":
            self.image = self.random.choice(["ab", "cd"]) * 32
        else:
            self.on_cluster = not self.on_cluster

    def _write(self, name: str) -> None:
        (self.folder / name).write_text(CODE[name][0].format(self.versions[name]))
        for function in (
            code._compute_digest,
            code._hash_file,
            code._list_imports,
            code._source_roots,
        ):
            # each command runs in its own process
            function.cache_clear()

    def origin(self, task: str) -> tuple[Any, ...]:
        """Return everything that the result of `task` depends on, independently of the cache
        key."""
        parts = ("prepare",) if task == "prepare" else ("prepare", "train")
        values = [
            (name, self.settings[name]) for name, (_, part) in SETTINGS.items() if part in parts
        ]
        versions = [(name, version) for name, version in self.versions.items() if CODE[name][1]]
        return (task, self.image if self.on_cluster else tuple(versions), *values)

    def look_up(self) -> Counter[str]:
        """Look up both tasks in the cache, and record the missing results."""
        sets = [f"{name}={value}" for name, value in self.settings.items()]
        sets += ["workload=mine", "families=[transformer]", f"cluster.image={IMAGE}{self.image}"]
        manifest = render_manifest(
            load_config(ROOT / "configs/demo.yaml", sets, environment={}).config
        )
        counts: Counter[str] = Counter()

        # the key of `train` is known only after the result of `prepare` is recorded
        for task in ("prepare", "train"):
            found = {
                result.task: result
                for result in lookup.look_up_tasks(
                    manifest, {}, self.store, is_on_cluster=self.on_cluster
                )
            }[task]
            origin = self.origin(task)
            counts["stale" if found.entry and origin not in self.results else ""] += 1
            counts["needless" if not found.entry and origin in self.results else ""] += 1
            counts["hit" if found.entry else "miss"] += 1

            if not found.entry:
                self._record(found, sha256(repr(origin).encode()).hexdigest())

            self.results.add(origin)

        return counts

    def _record(self, cache_result: lookup.CacheResult, digest: str) -> None:
        assert cache_result.key, cache_result.reason
        name = {"prepare": "dataset", "train": "model"}[cache_result.task]
        at = f"run-{digest[:12]}/{cache_result.task}"
        self.store.put(f"{at}/{name}/part", b"123")
        if cache_result.task == "prepare":
            outputs = {"digest": digest, "rows": "7", **OTHER_OUTPUTS}
        else:
            outputs = {}
        artifacts = {name: {"sha256": digest, "files": 1, "bytes": 3}}
        entries.record_entry(
            self.store,
            entries.Entry(cache_result.key, at, outputs, artifacts, {"step": "steps.x"}, 1.0),
        )


@pytest.mark.parametrize(
    "changes", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_random_changes_reuse_exactly_the_results_that_they_leave_valid(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_PATH", f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    # the cases of a process must not find the results of each other
    store = Store(f"{s3.bucket}-changes-{changes}", s3.endpoint)
    store.client.create_bucket(Bucket=store.bucket)
    demo = Demo(tmp_path, store, seed=changes)
    counts = Counter[str]()

    for number in range(changes):
        demo.change()
        cache_result = demo.look_up()
        assert not cache_result["stale"], (
            number,
            demo.settings,
            demo.versions,
            cache_result,
        )
        assert not cache_result["needless"], (
            number,
            demo.settings,
            demo.versions,
            cache_result,
        )
        counts += cache_result

    assert counts["hit"]
    assert counts["miss"]
    print(f"{changes} changes: {counts['hit']} hits, {counts['miss']} misses")

"""Broken manifests: a typing error must be one clear sentence before anything runs, never a traceback or a hang."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines import lint
from pipelines.local import subset
from pipelines.local.cluster import LocalCluster
from pipelines.local.manifest import documents, workflow
from pipelines.local.references import resolved
from pipelines.local.scheduler import Scheduler
from pipelines.local.shared import Shared
from pipelines.local.table import Began, Ended, Start
from steps.errors import ConfigError

EVERYTHING = """
kind: Workflow
metadata: {name: w}
spec:
  entrypoint: main
  onExit: say
  arguments: {parameters: [{name: x, value: "1", enum: ["1", "2"]}]}
  hooks: {running: {expression: workflow.status == "Running", template: say}}
  synchronization: {mutexes: [{name: m}]}
  templateDefaults: {timeout: 1m}
  templates:
  - name: main
    parallelism: 2
    steps:
    - - {name: a, template: say, arguments: {parameters: [{name: x, value: "{{workflow.parameters.x}}"}]},
         when: "1 == 1"}
      - {name: b, template: tasks, continueOn: {failed: true}}
    - - {name: c, template: say, withSequence: {count: "2"}, hooks: {exit: {template: say}}}
  - name: tasks
    dag:
      failFast: false
      tasks:
      - {name: d, template: say, withItems: [1, {k: v}, [2]]}
      - {name: e, depends: d.Succeeded || d.Failed, inline: {suspend: {duration: 1s}}}
  - name: say
    inputs: {parameters: [{name: x, default: "0"}], artifacts: [{name: f, path: /tmp/f, raw: {data: text}}]}
    retryStrategy: {limit: 2, backoff: {duration: 1s, factor: 2, cap: 1m}, expression: "asInt(lastRetry.exitCode) > 0"}
    memoize: {key: "k-{{inputs.parameters.x}}", maxAge: 1h, cache: {configMap: {name: kept}}}
    volumes: [{name: work, emptyDir: {}}]
    initContainers: [{name: i, image: busybox, command: ["true"]}]
    container: {image: busybox, command: [sh, -c], args: ["echo {{=asInt(inputs.parameters.x) + 1}}"],
      env: [{name: A, value: b}], volumeMounts: [{name: work, mountPath: /work}]}
    outputs: {parameters: [{name: out, valueFrom: {path: /tmp/y, default: "2"}}], artifacts: [{name: g, path: /tmp/g}]}
"""
RECORDED = sorted((Path(__file__).parents[2] / "conformance/recorded").glob("*.yaml"))
VALUES: list[Any] = [
    None,
    7,
    -1,
    0.5,
    True,
    "",
    "x",
    "{{",
    "{{=",
    "{{inputs.parameters.no}}",
    "1x",
    [],
    {},
    [None],
    [[]],
]
VALUES += [["x"], {"x": 1}, [{"name": None}], {"name": ["x"]}, "\ud83d\ude00", "a" * 300, "2024-01-01"]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below `value`."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def mutated(manifest: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    manifest = copy.deepcopy(manifest)
    for _ in range(chance.choice((1, 1, 2))):
        where, key = chance.choice(places(manifest))
        how = chance.randrange(4)
        if how == 0:
            del where[key]
        elif how == 1 and isinstance(where, dict):
            where[chance.choice([f"{key}s", str(key)[:-1], "nme", "template"])] = where.pop(key)
        elif how == 2:
            other, name = chance.choice(places(manifest))
            where[key] = copy.deepcopy(other[name])
        else:
            where[key] = copy.deepcopy(chance.choice(VALUES))
    return manifest


def prepared(manifest: dict[str, Any], cluster: LocalCluster) -> dict[str, Any]:
    """What LocalRun.new does before it writes anything."""
    flow = workflow(manifest, {}, cluster.find)
    subset.check(flow, cluster)
    lint.check(flow)
    return resolved(flow, cluster.find, lambda spec: subset.templates(spec, cluster))


def play(scheduler: Scheduler) -> None:
    now, events = 1000.0, []
    for _ in range(300):
        starts = [action for action in scheduler.advance(now, events) if isinstance(action, Start)]
        if scheduler.done:
            return
        now = max(now + 1, scheduler.wake or 0.0)
        phases = ["Succeeded", "Failed", "Error"]
        events = [
            e for i, s in enumerate(starts) for e in (Began(s.id), Ended(s.id, phases[i % 3], "", {"exitCode": "1"}))
        ]
    # one that retries for ever, or waits for a lock of its own, does so on Argo as well


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_a_broken_manifest_is_refused_in_a_sentence_or_runs(seed: int, tmp_path: Path) -> None:
    bases = [documents(EVERYTHING)[0], *(documents(path.read_text())[0] for path in RECORDED[:5])]
    cluster = LocalCluster(tmp_path)
    prepared(bases[0], cluster)
    for number in range(seed, seed + 20):
        chance = random.Random(number)
        manifest = mutated(bases[0] if number % 2 else chance.choice(bases), chance)
        shared = Shared(cluster)
        try:
            play(Scheduler(prepared(manifest, cluster), shared=shared))
        except ConfigError as error:
            assert 10 < len(str(error)) < 3000, number
            assert re.search(r"spec|metadata|kind|parameter|template|manifest", str(error)), error
        except Exception as error:
            raise AssertionError(f"seed {number}: {json.dumps(manifest)}") from error
        finally:
            shared.close()

"""Fuzz the parsers of answers: an answer of MLflow or of the API server is accepted, or rejected
with one short message."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rekindle import mlflow_api
from rekindle.cluster.kubernetes_api import describe_name, parse_object
from rekindle.cluster.objects.validation import find_fault, find_nodes_fault
from rekindle.cluster.workflows import decompress_nodes, get_effective_spec, list_result_parameters
from rekindle.documents import describe_first_error
from rekindle.errors import RekindleError
from rekindle.names import PathName
from rekindle.operations.retention import find_references
from tests.fuzz.mutation import change, mutate_bytes
from tests.rekindle.cluster import valid_objects
from tests.rekindle.mlflow_documents import DOCUMENTS

Case = Callable[[random.Random], None]
MODELS: dict[str, type[mlflow_api.Answer]] = {
    "mlflow/experiments/get-by-name": mlflow_api.ExperimentAnswer,
    "mlflow/experiments/search": mlflow_api.ExperimentsPage,
    "mlflow/runs/get": mlflow_api.RunAnswer,
    "mlflow/runs/search": mlflow_api.RunsPage,
    "mlflow/artifacts/list": mlflow_api.ArtifactsPage,
    "mlflow/registered-models/get": mlflow_api.ModelAnswer,
    "mlflow/registered-models/search": mlflow_api.ModelsPage,
    "mlflow/model-versions/get": mlflow_api.VersionAnswer,
    "mlflow/model-versions/search": mlflow_api.VersionsPage,
}
OBJECTS: dict[str, Any] = {
    "workflows": valid_objects.WORKFLOW,
    "pods": valid_objects.POD,
    "cronworkflows": valid_objects.CRON,
    "deployments": valid_objects.DEPLOYMENT,
    "nodes": valid_objects.CLUSTER_NODE,
    "resourcequotas": valid_objects.QUOTA,
    "events": valid_objects.EVENT,
}
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _make_changed_json(value: Any, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(1, 4)):
        value = change(value, rng)
    data = json.dumps(value).encode()
    if rng.random() < 0.3:
        return mutate_bytes(data, rng, [data])
    return data


def mlflow_answers(_folder: Path) -> Case:
    """Return a case that parses a changed answer of MLflow."""

    def case(rng: random.Random) -> None:
        path = rng.choice(list(MODELS))
        data = _make_changed_json(DOCUMENTS[path], rng)
        try:
            answer = MODELS[path].model_validate_json(data)
        except ValidationError as error:
            fault = describe_first_error(error)
            assert not CONTROLS.search(fault), repr(fault)
            assert len(fault) < 2000
            return

        if isinstance(answer, mlflow_api.RunAnswer):
            assert "/" not in answer.run.info.run_id
        if isinstance(answer, mlflow_api.VersionAnswer):
            assert int(answer.model_version.version) > 0

    return case


def cluster_objects(_folder: Path) -> Case:
    """Return a case that validates a changed object of the API server."""

    def case(rng: random.Random) -> None:
        plural = rng.choice(list(OBJECTS))
        obj = parse_object(_make_changed_json(OBJECTS[plural], rng))
        if obj is None:
            return

        fault = find_fault(plural, obj, rng.random() < 0.2)
        assert not CONTROLS.search(fault), repr(fault)
        assert not CONTROLS.search(describe_name(obj))
        find_references(json.dumps(obj))
        if find_fault(plural, obj):
            return

        PathName(obj["metadata"]["name"])
        if plural == "workflows":
            get_effective_spec(obj)
            list_result_parameters(obj)
            assert not find_nodes_fault((obj.get("status") or {}).get("nodes") or {})
            try:
                decompress_nodes(obj)
            except RekindleError as error:
                assert not CONTROLS.search(str(error)), repr(error)

    return case

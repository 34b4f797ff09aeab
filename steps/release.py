"""Release a model: upload its files, register a version, and give this version the alias
`candidate`.

    rekindle step steps.release --name=demo --dataset=dataset/ --model=model/ --report=report/ \\
      --verdict=release --run-id=... --output model_uri=uri.txt

rekindle/release/release_files.py lists the files of a release. If the step is repeated, it
completes an interrupted release and does not register a second version.
"""

import os
import platform
from typing import TYPE_CHECKING, Any

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, ConfigError, StepInputs, StepOutputs, gate
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST

if TYPE_CHECKING:
    from rekindle.documents import ModelFile


class Origin(StepInputs):
    """Provenance of the release, which is recorded in the tags of its version and of the MLflow
    run."""

    git_sha: str = Field(
        default="unknown", description="commit of the code that the pipeline was rendered from"
    )
    lock_hash: str = Field(default="", description="sha256 of the project's lock file")
    image: str = Field(default="host", description="container image of the training")
    image_digest: str = Field(default="host", description="digest of the training's image")
    config_hash: str = Field(default="unknown", description="sha256 of the resolved config")
    manifest_hash: str = Field(default="unknown", description="sha256 of the rendered manifest")


class Inputs(Origin):
    name: str = Field(
        description="name of the registered model, and first part of the release's key prefix"
    )
    dataset: Artifact = Field(description="output of prepare; dataset.json and state/ are released")
    model: Artifact = Field(description="output of train: model.safetensors and model.json")
    report: Artifact = Field(description="output of evaluate; verdict.json is released")
    verdict: gate.Verdict = Field(description="verdict of the gate, which must be `release`")
    run_id: str = Field(description="MLflow run that the version belongs to")
    source_digest: str = Field(default="", description="digest of the content of data.source")
    champion: str = Field(
        default="", description="version of the champion that the model was compared with"
    )
    created: str = Field(default="", description="time when the workflow was created, ISO 8601")
    parameters: list[dict[str, Any]] = Field(
        default_factory=list,
        description="the workflow's parameters, for `rekindle reproduce`: [{name, value}, ...]",
    )


class Outputs(StepOutputs):
    model_uri: str = Field(description="key prefix of the release in the object store")
    version: str = Field(description="version of the registered model")
    content: str = Field(
        description="first 12 digits of the hash in model_uri, for names of Kubernetes objects"
    )


def run(inputs: Inputs) -> Outputs:
    """Upload and register the release.

    Raises ConfigError if the verdict is not release, DataError for a damaged model.
    """
    from rekindle import Store, tracking
    from rekindle.content.verified_release import compute_content_hash
    from rekindle.content.weights import read_description
    from rekindle.release import origin, pyfunc
    from rekindle.release.release_files import (
        collect_files,
        commit_release,
        hash_described_files,
        upload,
    )

    if inputs.verdict != "release":
        raise ConfigError(
            f'the verdict is "{inputs.verdict}": only a model with the verdict "release" is'
            " released. See verdict.json for the reason; gate.* in the config sets the rule."
        )

    object_store = Store.from_env()
    run_id = tracking.resolve_run_id(inputs.run_id)
    model_description = read_description(inputs.model)
    release_folder = inputs.workdir / "release"
    file_hashes = collect_files(release_folder, inputs.model, inputs.dataset, inputs.report)
    (release_folder / origin.FILE).write_text(to_json(describe_origin(inputs), indent=1))
    file_hashes.update(pyfunc.write_mlmodel(release_folder))
    release_prefix = upload(object_store, inputs.name, release_folder, file_hashes)
    provenance_facts = provenance(inputs, model_description)
    registered_release = tracking.register_version(
        inputs.name,
        release_prefix,
        object_store.uri(release_prefix),
        model_description.sha256,
        run_id,
        provenance_facts,
    )

    release_record = {
        "name": inputs.name,
        "version": registered_release.version,
        "workload": model_description.workload,
        "model_sha256": model_description.sha256,
        "run_id": run_id,
        "provenance": provenance_facts,
        "files": file_hashes,
        "described": hash_described_files(release_folder),
    }

    commit_release(object_store, release_prefix, release_folder, release_record)

    run_tags = {
        tracking.MODEL_URI: release_prefix,
        tracking.VERSION: registered_release.version,
        tracking.MODEL_SHA256: model_description.sha256,
    }

    provenance_tags = {
        f"{tracking.TAG_PREFIX}{fact_name}": fact_value
        for fact_name, fact_value in provenance_facts.items()
    }
    tracking.log_to_run(run_id, run_tags=run_tags | provenance_tags)

    return Outputs(
        model_uri=release_prefix,
        version=registered_release.version,
        content=compute_content_hash(file_hashes)[:12],
    )


def describe_origin(inputs: Inputs) -> dict[str, Any]:
    """Return the data about the run that `rekindle reproduce` needs to repeat the run."""
    from rekindle import project
    from rekindle.cache import code, run_code
    from rekindle.content.recorded_manifest import unpack_manifest

    workflow_parameters = {
        parameter["name"]: parameter.get("value", "") for parameter in inputs.parameters
    }
    run_manifest = unpack_manifest(workflow_parameters.pop("manifest", ""))
    search_folders = project.search_path()
    module_names = run_code.list_named_modules(run_manifest, search_folders) if run_manifest else []

    python_environment = {
        "python": platform.python_version(),
        "packages": code.list_packages(),
        "modules": module_names,
    }

    inputs_of_run = {
        input_name: getattr(inputs, input_name)
        for input_name in ("created", "source_digest", "champion")
    }
    code_digests = code.module_digests(module_names, search_folders) if module_names else {}

    return {
        "parameters": workflow_parameters,
        "manifest": run_manifest,
        **inputs_of_run,
        **python_environment,
        "code": code_digests,
    }


def provenance(inputs: Inputs, model_description: "ModelFile") -> dict[str, str]:
    """Return the facts about the origin of the weights: data, code, settings, machine and image of
    the training, and the end time of the data."""
    from rekindle.workload import read_data_until

    provenance_facts = {fact_name: getattr(inputs, fact_name) for fact_name in Origin.model_fields}

    # the image is unknown in a local run, which executes steps on this machine, without the image
    # in the manifest
    if KUBERNETES_SERVICE_HOST not in os.environ:
        provenance_facts["image"] = "host"
        provenance_facts["image_digest"] = "host"

    if inputs.source_digest:
        provenance_facts["source_digest"] = inputs.source_digest
    provenance_facts["data_digest"] = model_description.digest or "unknown"

    data_until = read_data_until(inputs.dataset)
    if data_until:
        provenance_facts["data_until"] = data_until

    return provenance_facts | {
        fact_name: str(fingerprint_value)
        for fact_name, fingerprint_value in model_description.fingerprint.items()
    }

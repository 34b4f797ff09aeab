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
    from rekindle.content.verified_release import content_hash
    from rekindle.content.weights import read_description
    from rekindle.release import origin, pyfunc
    from rekindle.release.release_files import collect_files, commit, hash_describing_files, upload

    if inputs.verdict != "release":
        raise ConfigError(
            f'the verdict is "{inputs.verdict}": only a model with the verdict "release" is'
            " released. See verdict.json for the reason; gate.* in the config sets the rule."
        )

    store = Store.from_env()
    run_id = tracking.resolve_run_id(inputs.run_id)
    description = read_description(inputs.model)
    folder = inputs.workdir / "release"
    hashes = collect_files(folder, inputs.model, inputs.dataset, inputs.report)
    (folder / origin.FILE).write_text(to_json(describe_origin(inputs), indent=1))
    hashes.update(pyfunc.write_mlmodel(folder))
    prefix = upload(store, inputs.name, folder, hashes)
    facts = provenance(inputs, description)
    release = tracking.register(
        inputs.name, prefix, store.uri(prefix), description.sha256, run_id, facts
    )

    record = {
        "name": inputs.name,
        "version": release.version,
        "workload": description.workload,
        "model_sha256": description.sha256,
        "run_id": run_id,
        "provenance": facts,
        "files": hashes,
        "described": hash_describing_files(folder),
    }

    commit(store, prefix, folder, record)

    tags = {
        tracking.MODEL_URI: prefix,
        tracking.VERSION: release.version,
        tracking.MODEL_SHA256: description.sha256,
    }

    fact_tags = {f"{tracking.PREFIX}{name}": value for name, value in facts.items()}
    tracking.log(run_id, tags=tags | fact_tags)

    return Outputs(model_uri=prefix, version=release.version, content=content_hash(hashes)[:12])


def describe_origin(inputs: Inputs) -> dict[str, Any]:
    """Return the data about the run that `rekindle reproduce` needs to repeat it."""
    from rekindle import project
    from rekindle.cache import code, run_code
    from rekindle.content.recorded_manifest import unpack_manifest

    parameters = {parameter["name"]: parameter.get("value", "") for parameter in inputs.parameters}
    manifest = unpack_manifest(parameters.pop("manifest", ""))
    folders = project.search_path()
    modules = run_code.modules_in(manifest, folders) if manifest else []

    environment = {
        "python": platform.python_version(),
        "packages": code.list_packages(),
        "modules": modules,
    }

    inputs_of_run = {
        name: getattr(inputs, name) for name in ("created", "source_digest", "champion")
    }
    code_digests = code.module_digests(modules, folders) if modules else {}

    return {
        "parameters": parameters,
        "manifest": manifest,
        **inputs_of_run,
        **environment,
        "code": code_digests,
    }


def provenance(inputs: Inputs, description: "ModelFile") -> dict[str, str]:
    """Return what determines the weights (data, code, settings), where they were trained, and how
    recent their data is."""
    from rekindle.workload import read_data_until

    facts = {name: getattr(inputs, name) for name in Origin.model_fields}

    # a local run executes steps on this machine, without the image in the manifest
    if KUBERNETES_SERVICE_HOST not in os.environ:
        facts["image"] = "host"
        facts["image_digest"] = "host"

    facts.update({"source_digest": inputs.source_digest} if inputs.source_digest else {})
    facts["data_digest"] = description.digest or "unknown"
    facts.update({"data_until": until} if (until := read_data_until(inputs.dataset)) else {})

    return facts | {name: str(value) for name, value in description.fingerprint.items()}

"""Release a model: its files under a name that is their content, a version in the registry, the alias `candidate`.

    rekindle step steps.release --name=fraud --dataset=dataset/ --model=model/ --report=report/ --verdict=release \\
        --run-id=... --output model_uri=uri.txt

Below `releases/<name>/<hash>/`: model.safetensors, model.json, dataset.json, state/ (what the server needs to know of
the past), verdict.json and, written last, release.json. Done twice it registers nothing twice; interrupted anywhere,
doing it again completes it.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field

from rekindle.errors import ConfigError, DataError
from rekindle.step import Artifact, StepInputs, StepOutputs

MODEL = ("model.safetensors", "model.json")
PROVENANCE = ("git_sha", "image", "image_digest", "config_hash", "manifest_hash")


class Inputs(StepInputs):
    name: str = Field(description="registered model, and first part of the prefix")
    dataset: Artifact = Field(description="what prepare made: dataset.json and state/ go into the release")
    model: Artifact = Field(description="what train made: model.safetensors and model.json")
    report: Artifact = Field(description="what evaluate made: verdict.json goes into the release")
    verdict: str = Field(description="the gate's; anything but release is refused")
    run_id: str = Field(description="MLflow run that the version belongs to")
    git_sha: str = Field(default="unknown", description="commit of the code that the pipeline was rendered from")
    image: str = Field(default="host", description="container image of the training")
    image_digest: str = Field(default="host", description="its digest")
    config_hash: str = Field(default="unknown", description="sha256 of the resolved config")
    manifest_hash: str = Field(default="unknown", description="sha256 of the rendered manifest")


class Outputs(StepOutputs):
    model_uri: str = Field(description="key prefix of the release in the object store")
    version: str = Field(description="version of the registered model")
    previous: str = Field(description="key prefix of the release that served before; empty if none did")


def run(inputs: Inputs) -> Outputs:
    """Copy, register, commit. Raises ConfigError without a verdict to release, DataError for a damaged model."""
    from rekindle import tracking
    from rekindle.storage import Store, file_sha256

    if inputs.verdict != "release":
        raise ConfigError(
            f'the verdict is "{inputs.verdict}": only a model with the verdict "release" is released. '
            "See verdict.json for the reason; gate.* in the config sets the rule."
        )
    store = Store.from_env()
    card = model_card(inputs.model)
    files = release_files(inputs.model, inputs.dataset)
    hashes = {key: file_sha256(path) for key, path in sorted(files.items())}
    prefix = f"releases/{inputs.name}/{address(hashes)[:12]}/"
    for key, path in (files | {"verdict.json": inputs.report / "verdict.json"}).items():
        store.upload(path, prefix + key)

    champion = tracking.champion(inputs.name)
    facts = provenance(inputs, card)
    release = tracking.register(inputs.name, prefix, store.uri(prefix), card["sha256"], inputs.run_id, facts)
    record = {
        "name": inputs.name,
        "version": release.version,
        "workload": card["workload"],
        "model_sha256": card["sha256"],
        "run_id": inputs.run_id,
        "provenance": facts,
        "files": hashes,
    }
    store.put(prefix + "release.json", json.dumps(record, indent=1).encode())  # now it can be served
    tags = {"rekindle.model_uri": prefix, "rekindle.version": release.version, "rekindle.model_sha256": card["sha256"]}
    tracking.log(inputs.run_id, params=facts, tags=tags)
    return Outputs(model_uri=prefix, version=release.version, previous=champion.uri if champion else "")


def model_card(model: Path) -> dict[str, Any]:
    """model.json, which says what the weights are. Raises DataError."""
    try:
        card = json.loads((model / "model.json").read_text())
        return card | {name: card[name] for name in ("sha256", "workload")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{model} holds no trained model ({error!r}): model.json must say what it is.") from error


def release_files(model: Path, dataset: Path) -> dict[str, Path]:
    """Key below the prefix → file, of all that decides what the server answers. Raises DataError."""
    found = {name: model / name for name in MODEL} | {"dataset.json": dataset / "dataset.json"}
    found |= {str(file.relative_to(dataset)): file for file in (dataset / "state").rglob("*") if file.is_file()}
    for key, path in found.items():
        if not path.is_file():
            raise DataError(f"{path} is not there: a release needs {key}. Train, or prepare, again.")
    return found


def address(hashes: dict[str, str]) -> str:
    """sha256 over names and contents."""
    return hashlib.sha256("".join(f"{content}  {key}\n" for key, content in hashes.items()).encode()).hexdigest()


def provenance(inputs: Inputs, card: dict[str, Any]) -> dict[str, str]:
    """Everything that the weights are a function of, and where they were made."""
    facts = {name: getattr(inputs, name) for name in PROVENANCE}
    if "KUBERNETES_SERVICE_HOST" not in os.environ:  # the manifest names an image, but none was run
        facts |= {"image": "host", "image_digest": "host"}
    facts |= {"data_digest": card.get("digest", "unknown")}
    return facts | {name: str(value) for name, value in card.get("fingerprint", {}).items()}

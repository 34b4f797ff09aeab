"""What of the Argo API the local runner does, as a table: a field it does not know is refused by name, before anything starts.

    notes = check(workflow, cluster)     # raises ConfigError: the field, its path, and what to do

A field is OK (done, or checked below), HERE (it cannot matter on one machine: ignored, and said once), the name of another
table, `[name]` for a list of such, `{name}` for a map of such, or a text: why it is refused.
"""

import re
from collections.abc import Iterator
from typing import Any

from pipelines.local import executor, expr, resource
from pipelines.local.functions import ARGO, BUILTINS, PREDICATES, SPRIG, ExprError
from pipelines.local.golang import seconds
from steps.errors import ConfigError, did_you_mean

OK, HERE = "ok", "here"
TABLES: dict[str, dict[str, str]] = {}


def _table(name: str, ok: str = "", here: str = "", **other: str) -> None:
    TABLES[name] = dict.fromkeys(ok.split(), OK) | dict.fromkeys(here.split(), HERE) | other


PLACES = "nodeSelector tolerations affinity schedulerName priorityClassName hostAliases securityContext serviceAccountName"
_table("Workflow", "apiVersion kind metadata", "status", spec="Spec")
_table(
    "Spec",
    "entrypoint onExit parallelism activeDeadlineSeconds priority serviceAccountName",
    PLACES.replace("serviceAccountName", "")
    + " executor automountServiceAccountToken imagePullSecrets podPriorityClassName ttlStrategy podGC podDisruptionBudget"
    " dnsPolicy dnsConfig hostNetwork archiveLogs artifactGC artifactRepositoryRef podMetadata metrics",
    arguments="Arguments",
    templates="[Template]",
    hooks="Hooks",
    retryStrategy="Retry",
    templateDefaults="Template",
    workflowMetadata="Metadata",
    volumes="[Volume]",
    podSpecPatch="podSpecPatch changes pods in ways that are not known here",
    synchronization="there is nothing to synchronize with on one machine",
    workflowTemplateRef="the template is not at hand: run the WorkflowTemplate itself",
)
_table("Metadata", "labels annotations")
_table("Arguments", parameters="[Argument]", artifacts="[ArtifactArgument]")
_table("Argument", "name value enum description")
_table(
    "ArtifactArgument", "name from fromExpression subPath optional", "artifactGC deleted", s3="S3", raw="Raw", archive="Archive"
)
_table(
    "Template",
    "name parallelism failFast activeDeadlineSeconds timeout",
    PLACES + " metadata podSpecPatch executor automountServiceAccountToken priority archiveLocation metrics annotations"
    " dnsPolicy hostNetwork",
    inputs="Inputs",
    outputs="Outputs",
    container="Container",
    script="Container",
    resource="Resource",
    dag="Dag",
    steps="[[Step]]",
    suspend="Suspend",
    retryStrategy="Retry",
    volumes="[Volume]",
    **dict.fromkeys(
        ("http", "plugin", "data", "containerSet", "daemon", "sidecars", "initContainers", "memoize", "synchronization"),
        "only container, script, resource, dag, steps and suspend templates run here, one container a pod",
    ),
)
_table("Inputs", parameters="[Input]", artifacts="[InputArtifact]")
_table("Input", "name value default enum description")
_table(
    "InputArtifact", "name path optional mode recurseMode subPath", "artifactGC deleted", s3="S3", raw="Raw", archive="Archive"
)
_table("S3", "key", **dict.fromkeys(("bucket", "endpoint"), "artifacts lie in the store of the repository: give the key only"))
_table("Raw", "data")
_table("Archive", none="Empty", tar="Tar", zip="Empty")
_table("Empty")
_table("Tar", "compressionLevel")
_table("Outputs", "result exitCode", parameters="[Output]", artifacts="[OutputArtifact]")
_table("Output", "name value globalName description", valueFrom="ValueFrom")
_table("ValueFrom", "path default parameter expression jsonPath", jqFilter="use jsonPath", supplied="nobody supplies it here")
_table(
    "OutputArtifact",
    "name path optional from fromExpression subPath globalName mode",
    "artifactGC deleted",
    s3="S3",
    archive="Archive",
)
_table(
    "Container",
    "name image command args source workingDir",
    "imagePullPolicy resources securityContext terminationMessagePath terminationMessagePolicy ports livenessProbe"
    " readinessProbe startupProbe tty stdin",
    env="[Env]",
    envFrom="[EnvFrom]",
    volumeMounts="[Mount]",
    lifecycle="a pod here has one process and no hooks",
)
_table("Env", "name value", valueFrom="EnvSource")
_table("EnvSource", "configMapKeyRef secretKeyRef fieldRef")
_table("EnvFrom", "configMapRef secretRef prefix")
_table("Mount", "name mountPath readOnly", subPath="volumes are empty directories here")
_table("Volume", "name", emptyDir="Anything", **dict.fromkeys(("configMap", "secret"), "read it from the environment instead"))
_table("Anything", "medium sizeLimit")
_table(
    "Resource",
    "action manifest successCondition failureCondition flags mergeStrategy setOwnerReference",
    manifestFrom="put the manifest into the template",
)
_table("Suspend", "duration")
_table("Dag", "target failFast", tasks="[Task]")
CALL = "name template when withItems withParam continueOn onExit"
NOT_CALLED = {"templateRef": "the template is not at hand: put it into this manifest"}
_table("Task", CALL + " depends dependencies", arguments="Arguments", hooks="Hooks", withSequence="Sequence", **NOT_CALLED)
_table("Step", CALL, arguments="Arguments", hooks="Hooks", withSequence="Sequence", **NOT_CALLED)
_table("Sequence", "start end count format")
_table("Hooks", exit="Hook")
_table("Hook", "template expression", arguments="Arguments", **NOT_CALLED)
_table("Retry", "limit retryPolicy expression", backoff="Backoff", affinity=HERE)
_table("Backoff", "duration factor cap maxDuration")

LEAF = ("container", "script", "resource", "suspend")
BASES = ("python", "alpine", "busybox", "debian", "ubuntu", "bash")
TAG = re.compile(r"\{\{=(.*?)\}\}", re.S)


def check(workflow: dict[str, Any], cluster: Any) -> list[str]:
    """Raises ConfigError for the first thing that cannot be done as Argo does it; gives notes on what is ignored."""
    ignored: dict[str, None] = {}
    for path, name in _walk(workflow, "Workflow", ""):
        ignored.setdefault(name, None) if path else None
    spec = workflow["spec"]
    for index, template in enumerate(spec.get("templates") or []):
        _template(template, f"spec.templates[{index}]", cluster)
    _expressions(spec, "spec")
    known = ", ".join(ignored)
    return [f"ignored here, as one machine has no use for it: {known}"] if ignored else []


def _walk(value: Any, table: str, path: str) -> Iterator[tuple[str, str]]:
    """(path, field) of every ignored field. Raises ConfigError."""
    while table.startswith("["):
        if not isinstance(value, list):
            raise ConfigError(f"{path} is {value!r}: it must be a list.")
        for index, each in enumerate(value):
            yield from _walk(each, table[1:-1], f"{path}[{index}]")
        return
    if value is None:
        return
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is {value!r}: it must be an object.")
    fields = TABLES[table]
    for key, each in value.items():
        where = f"{path}.{key}" if path else key
        rule = fields.get(key)
        if key == "name" and not isinstance(each, str):
            raise ConfigError(f"{where} is {each!r}: it must be a text. Quote it (unquoted, YAML reads y as true, 1 as a number).")
        if rule is None:
            hint = did_you_mean(key, set(fields))
            raise ConfigError(f"{where} is not supported by the local runner.{hint or ' Remove it, or submit to a cluster.'}")
        if rule == HERE:
            yield where, key
        elif rule.strip("[]") in TABLES:
            yield from _walk(each, rule, where)
        elif rule != OK and each:
            raise ConfigError(f"{where} is not supported by the local runner: {rule}.")


def _template(template: dict[str, Any], where: str, cluster: Any) -> None:
    kinds = [kind for kind in (*LEAF, "dag", "steps") if kind in template]
    if len(kinds) != 1:
        raise ConfigError(f"{where} ({template.get('name')}) has {len(kinds)} types {kinds}: it must have exactly one.")
    if "suspend" in template and not (template["suspend"] or {}).get("duration"):
        raise ConfigError(f"{where}.suspend has no duration: nobody could resume it here. Give it one.")
    if "resource" in template:
        resource.check(template["resource"], f"{where}.resource")
    container = template.get("container") or template.get("script")
    if container is not None:
        if not container.get("image"):
            raise ConfigError(f"{where}.{kinds[0]}.image is missing: it says which program a pod is.")
        if not container.get("command"):
            raise ConfigError(f"{where}.{kinds[0]}.command is missing, and an image's own is not known here. Give it.")
        _image(container, f"{where}.{kinds[0]}", cluster)
        executor.check(template)
    for path, text in (("timeout", template.get("timeout")), *_backoffs(template.get("retryStrategy") or {})):
        if text and "{{" not in str(text):
            try:
                seconds(str(text))
            except ValueError as error:
                raise ConfigError(f"{where}.{path} is {text!r}: {error}. Write it like 1m30s.") from None


def _image(container: dict[str, Any], where: str, cluster: Any) -> None:
    """Without containers an image is a program of this machine: Python, a shell, or this repository's own steps."""
    image = container["image"]
    base = image.split("@")[0].rpartition("/")[2].partition(":")[0]
    own = [*container["command"], *(container.get("args") or [])][1:3] == ["-m", "steps"]
    if base not in BASES and not own and image not in cluster.images and "{{" not in image:
        raise ConfigError(
            f"{where}.image is {image!r}, and what it holds is not known on this machine: only {', '.join(BASES)} are, and "
            "images of this repository (they run python -m steps). Use one of these, or submit to a cluster."
        )


def _backoffs(strategy: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    backoff = strategy.get("backoff") or {}
    yield from ((f"retryStrategy.backoff.{key}", backoff.get(key)) for key in ("duration", "cap", "maxDuration"))


def _expressions(value: Any, where: str) -> None:
    """Every function that an expression calls must be known: it would fail at run time else, or worse, stay as text."""
    if isinstance(value, dict):
        for key, each in value.items():
            _expressions(each, f"{where}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _expressions(each, f"{where}[{index}]")
    elif isinstance(value, str):
        plain = [value] if where.endswith((".expression", ".fromExpression")) else []
        for source in [*TAG.findall(value), *plain]:
            try:
                called = expr.calls(source)
            except ExprError:
                continue  # stays as text, or fails its node, as on Argo
            for name in called:
                known = SPRIG if name.startswith("sprig.") else ARGO | BUILTINS | PREDICATES
                if name.removeprefix("sprig.") not in known:
                    raise ConfigError(
                        f"{where} calls {name}(), which the local runner does not know."
                        f"{did_you_mean(name.removeprefix('sprig.'), set(known))}"
                    )

"""What of the Argo API the local runner does, as a table: any other field is refused by name, before anything starts.

    notes = check(workflow, cluster)     # raises ConfigError: the field, its path, and what to do

One line of FIELDS is one object: `field` is done (or checked below), `field*` must be there, `-field` cannot matter on
one machine (ignored, and said once), `!field` is refused for the reason in WHY; `field=Object`, `field=[Object]` and
`field={Object}` (any keys) go on there.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from pipelines.local import (
    artifacts,
    companions,
    containerset,
    expr,
    json_path,
    pod,
    probes,
    resource,
    running,
    suspend,
    volumes,
)
from pipelines.local.cluster import BASES, base
from pipelines.local.functions import ARGO, BUILTINS, PREDICATES, SPRIG, ExprError
from pipelines.local.golang import seconds
from pipelines.local.references import bodies, holders, needed
from pipelines.local.retries import TYPES
from steps.errors import ConfigError, did_you_mean

FIELDS = """
Workflow apiVersion kind metadata -status spec=Spec
Spec entrypoint onExit parallelism suspend activeDeadlineSeconds priority serviceAccountName arguments=Arguments
  templates=[Template] hooks={Hook} retryStrategy=Retry templateDefaults=Template workflowMetadata=Metadata
  volumes=[Volume] volumeClaimTemplates=[Claim] volumeClaimGC=ClaimGC synchronization=Locks
  workflowTemplateRef=Reference -podSpecPatch -nodeSelector -tolerations
  -affinity -schedulerName -hostAliases -securityContext -executor -automountServiceAccountToken -imagePullSecrets
  -podPriorityClassName -ttlStrategy -podGC -podDisruptionBudget -dnsPolicy -dnsConfig -hostNetwork archiveLogs
  artifactGC=WorkflowGC -artifactRepositoryRef -podMetadata -podResources -metrics
Metadata labels annotations labelsFrom={LabelFrom}
LabelFrom expression*
WorkflowGC strategy -forceFinalizerRemoval -podMetadata -podSpecPatch -serviceAccountName
ArtifactGC strategy -podMetadata -serviceAccountName
Location archiveLogs s3=S3
Arguments parameters=[Argument] artifacts=[Supplied]
Argument name* value enum description valueFrom=Given
Given configMapKeyRef=Key default
Supplied name* from fromExpression subPath optional artifactGC=ArtifactGC -deleted s3=S3 raw=Raw http=Http
  archive=Archive
  !git !gcs !oss !azure !hdfs !artifactory !plugin
Template name parallelism failFast activeDeadlineSeconds timeout inputs=Inputs outputs=Outputs container=Container
  script=Container resource=Resource dag=Dag steps=[[Step]] suspend=Suspend retryStrategy=Retry
  volumes=[Volume] synchronization=Locks memoize=Memoize daemon initContainers=[Beside] sidecars=[Beside]
  -podSpecPatch -nodeSelector -tolerations -affinity -schedulerName -priorityClassName -hostAliases -securityContext
  -serviceAccountName -metadata -executor -automountServiceAccountToken archiveLocation=Location -metrics
  -annotations -podResources containerSet=ContainerSet data=Data http=Request !plugin
Inputs parameters=[Input] artifacts=[InputArtifact]
Input name* value default enum description valueFrom=Given
InputArtifact name* path optional mode recurseMode subPath artifactGC=ArtifactGC -deleted s3=S3 raw=Raw http=Http
  archive=Archive
  !git !gcs !oss !azure !hdfs !artifactory !plugin
S3 key bucket endpoint insecure accessKeySecret=Key secretKeySecret=Key -region
Http url* headers=[Header] !auth
Header name* value*
Raw data*
Archive none=Empty tar=Tar zip=Empty
Empty
Tar compressionLevel
Outputs result exitCode parameters=[Output] artifacts=[OutputArtifact]
Output name* value globalName description valueFrom=ValueFrom
ValueFrom path default parameter expression jsonPath supplied=Empty !jqFilter
OutputArtifact name* path optional from fromExpression subPath globalName mode artifactGC=ArtifactGC -deleted s3=S3
  archive=Archive
  !git !gcs !oss !azure !hdfs !artifactory !plugin
Container name image command args source workingDir env=[Env] envFrom=[EnvFrom] volumeMounts=[Mount] !lifecycle
  -imagePullPolicy -resources -securityContext -terminationMessagePath -terminationMessagePolicy -ports -livenessProbe
  readinessProbe=Probe -startupProbe -tty -stdin
Probe exec=Exec httpGet=HttpGet tcpSocket=Tcp initialDelaySeconds periodSeconds timeoutSeconds successThreshold
  -failureThreshold -terminationGracePeriodSeconds !grpc
Exec command*
HttpGet port* path host scheme httpHeaders=[Header]
Tcp port* host
ContainerSet containers*=[Member] volumeMounts=[Mount] retryStrategy=Tries
Tries retries* duration
Member name* image command args workingDir env=[Env] envFrom=[EnvFrom] volumeMounts=[Mount] dependencies !lifecycle
  -imagePullPolicy -resources -securityContext -ports -livenessProbe -readinessProbe -startupProbe -tty -stdin
  -terminationMessagePath -terminationMessagePolicy
Request url* method headers=[RequestHeader] body bodyFrom=BodyFrom successCondition timeoutSeconds insecureSkipVerify
RequestHeader name* value valueFrom=HeaderFrom
HeaderFrom secretKeyRef*=Key
BodyFrom bytes
Data source*=DataSource transformation=[Transformation]
DataSource artifactPaths*=ArtifactPaths
ArtifactPaths name s3*=S3 -artifactGC -deleted
Transformation expression
Beside name* image command args workingDir env=[Env] envFrom=[EnvFrom] volumeMounts=[Mount] mirrorVolumeMounts
  -imagePullPolicy -resources -securityContext -ports -livenessProbe -readinessProbe -startupProbe -tty -stdin
Env name* value valueFrom=EnvSource
EnvSource configMapKeyRef secretKeyRef fieldRef=FieldRef
EnvFrom configMapRef secretRef prefix
Mount name* mountPath* readOnly subPath subPathExpr -mountPropagation
Volume name* emptyDir=EmptyDir configMap=MapVolume secret=SecretVolume projected=Projected downwardAPI=Facts
  persistentVolumeClaim=ClaimRef !hostPath !ephemeral !csi !nfs
EmptyDir -medium -sizeLimit
MapVolume name* items=[File] defaultMode optional
SecretVolume secretName* items=[File] defaultMode optional
MapPart name* items=[File] optional
File key* path* mode
Projected sources=[Projection] defaultMode
Projection configMap=MapPart secret=MapPart downwardAPI=Facts !serviceAccountToken
Facts items=[Fact] defaultMode
Fact path* fieldRef*=FieldRef mode
FieldRef fieldPath* -apiVersion
ClaimRef claimName* readOnly
Claim metadata*=ClaimName -apiVersion -kind -spec -status
ClaimName name* -labels -annotations -creationTimestamp
ClaimGC strategy
Resource action manifest successCondition failureCondition flags mergeStrategy setOwnerReference !manifestFrom
Suspend duration
Dag target failFast tasks*=[Task]
Task name* template when withItems withParam continueOn onExit depends dependencies arguments=Arguments hooks={Hook}
  withSequence=Sequence templateRef=Reference inline=Template
Step name* template when withItems withParam continueOn onExit arguments=Arguments hooks={Hook} withSequence=Sequence
  templateRef=Reference inline=Template
Sequence start end count format
Hook template expression arguments=Arguments templateRef=Reference
Reference name* template clusterScope
Locks semaphores=[Semaphore] mutexes=[Mutex] !semaphore !mutex
Semaphore configMapKeyRef*=Key namespace !database
Key name* key optional
Mutex name* namespace !database
Memoize key* maxAge cache*=Cache
Cache configMap*=Key
Retry limit retryPolicy expression backoff=Backoff -affinity
Backoff duration factor cap maxDuration
"""
TABLES: dict[str, dict[str, str]] = {}
REQUIRED: dict[str, list[str]] = {}
for line in FIELDS.replace("\n  ", " ").strip().splitlines():
    words = line.split()
    pairs = [word.partition("=") for word in words[1:]]
    TABLES[words[0]] = {name.strip("-!*"): type or name[0] for name, _, type in pairs}
    REQUIRED[words[0]] = [name.rstrip("*") for name, _, _ in pairs if name.endswith("*")]
WHY = (
    {"plugin": "Argo's plugins do not run here", "auth": "give the header", "grpc": "use exec or tcpSocket"}
    | {
        "mutex": "Argo 4 has dropped it. Write mutexes: [...]",
        "semaphore": "Argo 4 has dropped it. Write semaphores: [...]",
        "database": "locks lie in this machine's files. Use a mutex, or a semaphore with a configMapKeyRef",
        "jqFilter": "use jsonPath",
        "lifecycle": "a pod here has one process and no hooks",
        "hostPath": "a pod here sees nothing of the machine that is not in its volumes. Use a claim",
        "serviceAccountToken": "there are no service accounts here",
    }
    | dict.fromkeys(("git", "gcs", "oss", "azure", "hdfs", "artifactory"), "artifacts are s3, http or raw here")
    | dict.fromkeys(("ephemeral", "csi", "nfs"), "use volumeClaimTemplates")
    | {
        "manifestFrom": "put the manifest into the template",
    }
)
# what the API server refuses, and what would be taken for something else here
PATCHED = {"containers", "initContainers", "securityContext", "nodeSelector", "tolerations", "priorityClassName"}
FLAGS = ("archiveLogs", "readOnly")
NUMBERS = ("activeDeadlineSeconds", "parallelism", "mode", "defaultMode")
TEXTS = ("name", "entrypoint", "onExit", "template", "when", "depends", "image", "source", "manifest", "key", "path")
TEXTS += (
    "maxAge",
    "mountPath",
    "workingDir",
    "expression",
    "fromExpression",
    "retryPolicy",
    "target",
    "timeout",
)
TEXTS += ("globalName", "from", "subPath", "withParam", "jsonPath", "parameter")
TEXTS += ("claimName", "secretName", "fieldPath", "subPathExpr")
LISTS = ("command", "args", "flags", "dependencies")
EXPRESSION = re.compile(r"\{\{=(.*?)\}\}", re.DOTALL)
TAG = re.compile(r"\{\{.*?\}\}", re.DOTALL)


def check(workflow: dict[str, Any], cluster: Any) -> list[str]:
    """Raises ConfigError for the first thing that cannot be done as Argo does it; gives notes on what is ignored."""
    ignored = dict.fromkeys(_walk(workflow, "Workflow", ""))
    for each in (workflow["spec"].get("arguments") or {}).get("parameters") or []:
        if each.get("value") is None:
            raise ConfigError(f"the parameter {each['name']} has no value: give one, as with -p {each['name']}=...")
    _bodies(workflow["spec"], cluster)
    volumes.check(workflow["spec"], bodies(workflow["spec"], "spec"))
    _objects(workflow["spec"], cluster)
    return [f"ignored here, as one machine has no use for it: {', '.join(ignored)}"] if ignored else []


def _objects(spec: dict[str, Any], cluster: Any) -> None:
    """What pods wait for in vain is said at once; but a resource template may make it while the workflow runs."""
    if any("resource" in template for template, _ in bodies(spec, "spec")):
        return
    for where, kind, name, key in needed(spec):
        if not cluster.has(kind, name, key):
            what = f"{kind} {name!r}" + (f" with {key!r}" if key else "")
            raise ConfigError(
                f"{where}: there is no {what} here, and its pods would wait for it. Put it into the file of the "
                "Workflow, separated by ---."
            )


def templates(spec: dict[str, Any], cluster: Any) -> None:
    """The same for the spec of a WorkflowTemplate that is referred to."""
    list(_walk(spec, "Spec", "spec"))
    _bodies(spec, cluster)


def _bodies(spec: dict[str, Any], cluster: Any) -> None:
    _patch(spec, "spec")
    _hooks(spec)
    for template, path in bodies(spec, "spec"):
        _template(template, path, cluster)
    _expressions(spec, "spec")


def _walk(value: Any, table: str, path: str) -> Iterator[str]:
    """Every ignored field. Raises ConfigError."""
    if table.startswith("["):
        if not isinstance(value, list):
            raise ConfigError(f"{path} is {value!r}: it must be a list.")
        for index, each in enumerate(value):
            yield from _walk(each, table[1:-1], f"{path}[{index}]")
        return
    if table.startswith("{") and isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, table[1:-1], f"{path}.{key}")
        return
    if not isinstance(value, dict | None):
        raise ConfigError(f"{path} is {value!r}: it must be an object.")
    fields = TABLES[table.strip("{}")]
    for key, each in (value or {}).items():
        where = f"{path}.{key}" if path else key
        rule = fields.get(key)
        if rule is None:
            hint = did_you_mean(key, set(fields)) or " Remove it, or submit to a cluster."
            raise ConfigError(f"{where} is not supported by the local runner.{hint}")
        if rule.strip("[]{}") not in TABLES:
            _typed(key, each, where)
        if rule == "-":
            yield key
        elif rule == "!":
            if each:
                raise ConfigError(f"{where} is not supported by the local runner: {WHY[key]}.")
        elif rule.strip("[]{}") in TABLES:
            yield from _walk(each, rule, where)
    for key in REQUIRED[table.strip("{}")]:
        if (value or {}).get(key) is None:
            raise ConfigError(f"{path}.{key} is missing: give it.")


def _typed(key: str, value: Any, where: str) -> None:
    quote = "Quote it (unquoted, YAML reads y as true and 1 as a number)."
    if (key in TEXTS or where.endswith(".raw.data")) and value is not None and not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}: it must be a text. {quote}")
    if key in LISTS and value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        raise ConfigError(f"{where} is {value!r}: it must be a list of texts. {quote}")
    if where.endswith("artifactGC.strategy") and (value or "") not in artifacts.GC:
        raise ConfigError(f"{where} is {value!r}: it must be one of {', '.join(artifacts.GC[:-1])}.")
    if key in FLAGS and not isinstance(value, bool | None):
        raise ConfigError(f"{where} is {value!r}: it must be true or false.")
    if key == "fieldPath" and value not in pod.FACTS:
        raise ConfigError(f"{where} is {value!r}, which a pod here does not know: only {', '.join(pod.FACTS)} are.")
    if key in NUMBERS and value is not None and "{{" not in str(value) and not str(value).isdecimal():
        raise ConfigError(f"{where} is {value!r}: it must be a whole number.")


def _template(template: dict[str, Any], where: str, cluster: Any) -> None:
    types = [each for each in TYPES if each in template]
    if len(types) != 1:
        raise ConfigError(f"{where} ({template.get('name')}) has {len(types)} types {types}: it must have exactly one.")
    suspend.check(template, where)
    if template.get("daemon") and where.endswith(".inline"):
        raise ConfigError(
            f"{where}.daemon is true, but Argo does not find an inline template again, and waits for its pod to end. "
            "Put it with the other templates."
        )
    if "resource" in template:
        resource.check(template["resource"], f"{where}.resource")
    if container := template.get("container") or template.get("script"):
        _image(container, f"{where}.{types[0]}", cluster)
        running.check(template)
        for kind in companions.KINDS:
            for index, each in enumerate(template.get(kind) or []):
                _image(each, f"{where}.{kind}[{index}]", cluster)
        companions.check(template, where)
        probes.check(template, where)
    if group := template.get("containerSet"):
        containerset.check(template, where)
        for index, each in enumerate(group["containers"]):
            _image(each, f"{where}.containerSet.containers[{index}]", cluster)
        running.check(template)
    _patch(template, where)
    backoff = (template.get("retryStrategy") or {}).get("backoff") or {}
    durations = {f"retryStrategy.backoff.{key}": backoff.get(key) for key in ("duration", "cap", "maxDuration")}
    tries = (template.get("containerSet") or {}).get("retryStrategy") or {}
    durations["containerSet.retryStrategy.duration"] = tries.get("duration")
    durations["suspend.duration"] = (template.get("suspend") or {}).get("duration")
    durations["memoize.maxAge"] = (template.get("memoize") or {}).get("maxAge")
    for path, text in {"timeout": template.get("timeout"), **durations}.items():
        try:
            if text and "{{" not in str(text):
                seconds(str(text))
        except ValueError as error:
            raise ConfigError(f"{where}.{path} is {text!r}: {error}. Write it like 1m30s.") from None


def _hooks(spec: dict[str, Any]) -> None:
    for hook, path in holders(spec, "spec"):
        if ".hooks." in path and not path.endswith(".hooks.exit") and not hook.get("expression"):
            raise ConfigError(f"{path}.expression is missing: only an exit hook runs without one.")


def _patch(holder: dict[str, Any], where: str) -> None:
    """A patch of the pod is ignored where it changes only what has no place on one machine."""
    text = holder.get("podSpecPatch") or "{}"
    try:
        patch = yaml.safe_load(TAG.sub("0", text))
        containers = [each for kind in ("containers", "initContainers") for each in patch.get(kind) or []]
        inside = {key for each in containers for key in each}
        other = set(patch) - PATCHED | inside - {"name", "securityContext", "resources"}
    except (yaml.YAMLError, AttributeError, TypeError):
        other = {text}
    if other:
        raise ConfigError(
            f"{where}.podSpecPatch changes {', '.join(sorted(map(str, other)))}, which the local runner cannot: only "
            "resources and security contexts are ignored. Write it into the template."
        )


def _image(container: dict[str, Any], where: str, cluster: Any) -> None:
    """Without containers an image is a program of this machine: Python, a shell, or this repository's own steps."""
    image, command = container.get("image"), container.get("command")
    if not image:
        raise ConfigError(f"{where}.image is missing: give it.")
    known = cluster.image(image)
    if not (command or known.command or known.args):
        raise ConfigError(f"{where}.command is missing, and what {image} runs is not known here. Give it.")
    own = [*(command or []), *(container.get("args") or [])][1:3] == ["-m", "steps"]
    if base(image) not in BASES and not own and image not in cluster.images and "{{" not in image:
        raise ConfigError(
            f"{where}.image is {image!r}, and what it holds is not known on this machine: only {', '.join(BASES)} are, "
            "and images of this repository (they run python -m steps). Use one of these, say what it is here in "
            f"{cluster.home / 'images.yaml'} ({image}: {{command: [...]}}), or submit to a cluster."
        )


def _expressions(value: Any, where: str) -> None:
    """Every function that an expression calls must be known: it would fail late else, or worse, stay as text."""
    if isinstance(value, dict):
        for key, each in value.items():
            _expressions(each, f"{where}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _expressions(each, f"{where}[{index}]")
    elif isinstance(value, str):
        plain = [value] if where.endswith((".expression", ".fromExpression", ".http.successCondition")) else []
        for source in [*EXPRESSION.findall(value), *plain]:
            _functions(source, where)


def _functions(source: str, where: str) -> None:
    try:
        called = expr.calls(source)
    except ExprError:
        return  # stays as text, or fails its node, as on Argo
    for name, arguments in called:
        if name == "jsonpath" and isinstance(path := (arguments[1:2] or [None])[0], str):
            _path(path, where)
        known = set(SPRIG) if name.startswith("sprig.") else {*ARGO, *BUILTINS, *PREDICATES}
        if (short := name.removeprefix("sprig.")) not in known:
            hint = did_you_mean(short, known)
            raise ConfigError(f"{where} calls {name}(), which the local runner does not know.{hint}")


def _path(path: str, where: str) -> None:
    try:
        json_path.tokens(path)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None

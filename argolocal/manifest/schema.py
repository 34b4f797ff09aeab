"""The fields of Argo's API that the local runner supports, as a table. The runner rejects other
fields, and values of a wrong type.

    ignored_fields = list(find_ignored_fields(workflow, "Workflow", ""))     # raises ConfigError

Each line of FIELD_TABLE starts with the name of a type of objects. The other words of a line are
the fields of this type, each with its type:

    field       supported
    field*      required
    -field      ignored with a notice, because it does not have an effect on one machine
    !field      rejected for the reason in REASONS_UNSUPPORTED
    field=X     the field's type: a type of values in RULE_BY_TYPE, or a type of objects, also as
                [X] (a list) or {X} (a map); without =X, the type is text

The types are the same as in the Go structs of Argo 4.1. Fields of type text may contain tags, and
number fields must not.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from argolocal.errors import ConfigError, suggest_similar
from argolocal.language.gofmt import INTEGER, parse_seconds
from argolocal.language.quantity import parse_quantity
from argolocal.manifest.allowed_values import (
    ARTIFACT_GC_STRATEGIES,
    DOWNWARD_API_FIELDS,
    RETRY_POLICIES,
)

FIELD_TABLE = """
Workflow apiVersion kind metadata=ObjectMeta -status spec=Spec
WorkflowTemplate apiVersion kind metadata=ObjectMeta -status spec=Spec
CronWorkflow apiVersion kind metadata=ObjectMeta -status spec*=CronSpec
ObjectMeta name generateName namespace labels=map annotations=map ownerReferences=list finalizers=texts
  managedFields=list uid resourceVersion generation=int64 selfLink creationTimestamp deletionTimestamp
  deletionGracePeriodSeconds=int64
CronSpec workflowSpec*=Spec workflowMetadata=ObjectMeta -schedules*=texts -timezone=text
  -concurrencyPolicy=concurrency -suspend=bool -startingDeadlineSeconds=seconds -successfulJobsHistoryLimit=int32
  -failedJobsHistoryLimit=int32 -stopStrategy=Stop -when=text !schedule
Stop expression*
Spec entrypoint onExit parallelism=atleast1 suspend=bool activeDeadlineSeconds=seconds priority=int32
  serviceAccountName arguments=Arguments templates=[Template] hooks={Hook} retryStrategy=Retry
  templateDefaults=Template workflowMetadata=Metadata volumes=[Volume] volumeClaimTemplates=[Claim]
  volumeClaimGC=ClaimGC synchronization=Locks workflowTemplateRef=Reference podSpecPatch=text -nodeSelector=map
  -tolerations=list -affinity -schedulerName=text -hostAliases=list -securityContext -executor
  -automountServiceAccountToken=bool -imagePullSecrets=list -podPriorityClassName=text -ttlStrategy -podGC
  -podDisruptionBudget -dnsPolicy=text -dnsConfig -hostNetwork=bool archiveLogs=bool artifactGC=WorkflowGC
  -artifactRepositoryRef -podMetadata -podResources -metrics
Metadata labels=map annotations=map labelsFrom={LabelFrom}
LabelFrom expression*
WorkflowGC strategy=gc -forceFinalizerRemoval=bool -podMetadata -podSpecPatch=text -serviceAccountName=text
ArtifactGC strategy=gc -podMetadata -serviceAccountName=text
Location archiveLogs=bool s3=S3
Arguments parameters=[Argument] artifacts=[ArgumentArtifact]
Argument name* value=scalar enum=scalars description=scalar valueFrom=ArgumentSource
ArgumentSource configMapKeyRef=Key default=scalar
ArgumentArtifact name* from fromExpression subPath optional=bool artifactGC=ArtifactGC -deleted=bool s3=S3 raw=Raw http=Http
  archive=Archive !git !gcs !oss !azure !hdfs !artifactory !plugin
Template name parallelism=atleast1 failFast=bool activeDeadlineSeconds=deadline timeout=timeout inputs=Inputs
  outputs=Outputs container=Container script=Container resource=Resource dag=Dag steps=[[Step]] suspend=Suspend
  retryStrategy=Retry volumes=[Volume] synchronization=Locks memoize=Memoize daemon=bool initContainers=[ExtraContainer]
  sidecars=[ExtraContainer] podSpecPatch=text -nodeSelector=map -tolerations=list -affinity -schedulerName=text
  -priorityClassName=text -hostAliases=list -securityContext -serviceAccountName=text -metadata -executor
  -automountServiceAccountToken=bool archiveLocation=Location -metrics -annotations=map -podResources
  containerSet=ContainerSet data=Data http=Request !plugin
Inputs parameters=[Input] artifacts=[InputArtifact]
Input name* value=scalar default=scalar enum=scalars description=scalar valueFrom=ArgumentSource
InputArtifact name* path optional=bool mode=mode recurseMode=bool subPath artifactGC=ArtifactGC -deleted=bool s3=S3
  raw=Raw http=Http archive=Archive !git !gcs !oss !azure !hdfs !artifactory !plugin
S3 key bucket endpoint insecure=bool accessKeySecret=Key secretKeySecret=Key -region=text
Http url* headers=[Header] !auth
Header name* value*
Raw data*
Archive none=Empty tar=Tar zip=Empty
Empty
Tar compressionLevel=int32
Outputs result exitCode parameters=[Output] artifacts=[OutputArtifact]
Output name* value=scalar globalName description=scalar valueFrom=ValueFrom
ValueFrom path default=scalar parameter expression jsonPath supplied=Empty !jqFilter
OutputArtifact name* path optional=bool from fromExpression subPath globalName mode=mode artifactGC=ArtifactGC
  -deleted=bool s3=S3 archive=Archive !git !gcs !oss !azure !hdfs !artifactory !plugin
Container name image command=texts args=texts source workingDir env=[Env] envFrom=[EnvFrom] volumeMounts=[Mount]
  !lifecycle -imagePullPolicy=text resources=Resources -securityContext -terminationMessagePath=text
  -terminationMessagePolicy=text -ports=list -livenessProbe readinessProbe=Probe -startupProbe -tty=bool -stdin=bool
Probe exec=Exec httpGet=HttpGet tcpSocket=Tcp initialDelaySeconds=int32 periodSeconds=int32 timeoutSeconds=int32
  successThreshold=int32 -failureThreshold=int32 -terminationGracePeriodSeconds=int64 !grpc
Exec command*=texts
HttpGet port*=port path host scheme httpHeaders=[Header]
Tcp port*=port host
ContainerSet containers*=[Member] volumeMounts=[Mount] retryStrategy=ContainerRetry
ContainerRetry retries*=intstr duration=duration
Member name* image command=texts args=texts workingDir env=[Env] envFrom=[EnvFrom] volumeMounts=[Mount]
  dependencies=texts !lifecycle -imagePullPolicy=text resources=Resources -securityContext -ports=list -livenessProbe
  -readinessProbe -startupProbe -tty=bool -stdin=bool -terminationMessagePath=text -terminationMessagePolicy=text
Request url* method headers=[RequestHeader] body bodyFrom=BodyFrom successCondition timeoutSeconds=int64
  insecureSkipVerify=bool
RequestHeader name* value valueFrom=HeaderFrom
HeaderFrom secretKeyRef*=Key
BodyFrom bytes
Data source*=DataSource transformation=[Transformation]
DataSource artifactPaths*=ArtifactPaths
ArtifactPaths name s3*=S3 -artifactGC -deleted=bool
Transformation expression
ExtraContainer name* image command=texts args=texts workingDir env=[Env] envFrom=[EnvFrom] volumeMounts=[Mount]
  mirrorVolumeMounts=bool -imagePullPolicy=text resources=Resources -securityContext -ports=list -livenessProbe
  -readinessProbe -startupProbe -tty=bool -stdin=bool
PodPatch containers=[Patched] initContainers=[Patched] activeDeadlineSeconds=int64 terminationGracePeriodSeconds=int64
  -nodeSelector=map -tolerations=list -affinity -priorityClassName=text -securityContext -schedulerName=text -resources
  -serviceAccountName=text -automountServiceAccountToken=bool -imagePullSecrets=list -runtimeClassName=text
  -topologySpreadConstraints=list -preemptionPolicy=text -dnsPolicy=text -dnsConfig -hostNetwork=bool -hostAliases=list
Patched name* env=[Env] resources=Resources -securityContext -imagePullPolicy=text -ports=list -livenessProbe
  -startupProbe -terminationMessagePath=text -terminationMessagePolicy=text -tty=bool -stdin=bool
Resources limits=quantities -requests=quantities -claims=list
Env name* value valueFrom=EnvSource
EnvSource configMapKeyRef=Key secretKeyRef=Key fieldRef=FieldRef
EnvFrom configMapRef=Ref secretRef=Ref prefix
Ref name* optional=bool
Mount name* mountPath* readOnly=bool subPath subPathExpr -mountPropagation=text
Volume name* emptyDir=EmptyDir configMap=MapVolume secret=SecretVolume projected=Projected downwardAPI=DownwardFiles
  persistentVolumeClaim=ClaimRef !hostPath !ephemeral !csi !nfs
EmptyDir -medium=text -sizeLimit
MapVolume name* items=[File] defaultMode=mode optional=bool
SecretVolume secretName* items=[File] defaultMode=mode optional=bool
ProjectedMap name* items=[File] optional=bool
File key* path* mode=mode
Projected sources=[Projection] defaultMode=mode
Projection configMap=ProjectedMap secret=ProjectedMap downwardAPI=DownwardFiles !serviceAccountToken
DownwardFiles items=[DownwardFile] defaultMode=mode
DownwardFile path* fieldRef*=FieldRef mode=mode
FieldRef fieldPath*=downward -apiVersion=text
ClaimRef claimName* readOnly=bool
Claim metadata*=ClaimName -apiVersion=text -kind=text -spec -status
ClaimName name* -labels=map -annotations=map -creationTimestamp
ClaimGC strategy
Resource action manifest successCondition failureCondition flags=texts mergeStrategy setOwnerReference=bool
  !manifestFrom
Suspend duration=duration
Dag target failFast=bool tasks*=[Task]
Task name* template when withItems=list withParam continueOn=ContinueOn onExit depends dependencies=texts
  arguments=Arguments hooks={Hook} withSequence=Sequence templateRef=Reference inline=Template
Step name* template when withItems=list withParam continueOn=ContinueOn onExit arguments=Arguments hooks={Hook}
  withSequence=Sequence templateRef=Reference inline=Template
ContinueOn error=bool failed=bool
Sequence start=intstr end=intstr count=intstr format
Hook template expression arguments=Arguments templateRef=Reference
Reference name* template clusterScope=bool
Locks semaphores=[Semaphore] mutexes=[Mutex] !semaphore !mutex
Semaphore configMapKeyRef*=Key namespace !database
Key name* key optional=bool
Mutex name*=nonempty namespace !database
Memoize key* maxAge=duration cache*=Cache
Cache configMap*=Key
Retry limit=intstr retryPolicy=policy expression backoff=Backoff -affinity
Backoff duration=duration factor=intstr cap=duration maxDuration=duration
"""
# type of objects → name of a field → type of the field; the type "-" means that the field is
# ignored, and "!" that it is rejected
TABLES: dict[str, dict[str, str]] = {}
# type of objects → name of a field → type of the field
FIELD_TYPES: dict[str, dict[str, str]] = {}
REQUIRED_FIELDS: dict[str, list[str]] = {}
for line in FIELD_TABLE.replace("\n  ", " ").strip().splitlines():
    words = line.split()
    pairs = [word.partition("=") for word in words[1:]]
    flags = {
        name.strip("-!*"): name[0] if name[0] in "-!" else type or "text" for name, _, type in pairs
    }
    TABLES[words[0]] = flags
    FIELD_TYPES[words[0]] = {
        name.strip("-!*"): type or flags[name.strip("-!*")] for name, _, type in pairs
    }
    REQUIRED_FIELDS[words[0]] = [name.strip("-*") for name, _, _ in pairs if name.endswith("*")]
REASONS_UNSUPPORTED = (
    {
        "plugin": "the local runner does not run plugins",
        "auth": "give the header Authorization",
        "grpc": "use exec or tcpSocket",
        "mutex": "Argo 4 removed it. Write mutexes: [...]",
        "semaphore": "Argo 4 removed it. Write semaphores: [...]",
        "schedule": "Argo 4 removed it. Write schedules: [...]",
        "database": "locks are local files. Use a mutex, or a semaphore with a configMapKeyRef",
        "jqFilter": "use jsonPath",
        "lifecycle": "local pods do not run hooks",
        "hostPath": (
            "local pods cannot access other files of the machine. Use a persistentVolumeClaim"
        ),
        "manifestFrom": "put the manifest into the template",
        "serviceAccountToken": "the local runner does not have service accounts",
    }
    | dict.fromkeys(("git", "gcs", "oss", "azure", "hdfs", "artifactory"), "use s3")
    | dict.fromkeys(("ephemeral", "csi", "nfs"), "use volumeClaimTemplates")
)
# function that returns the requirement that a value violates; "" for a valid value
Rule = Callable[[Any], str]
# the longest duration of Go's time.Duration
MAX_DURATION_S = 2**63 // 10**9
INT32_RANGE = (-(2**31), 2**31 - 1)
INT64_RANGE = (-(2**63), 2**63 - 1)
QUOTE_HINT = "Quote it (unquoted, YAML reads y as true and 1 as a number)"


def _make_type_rule(value_type: Any, type_name: str) -> Rule:
    return lambda value: "" if isinstance(value, value_type) else f"it must be {type_name}"


def _make_list_rule(rule: Rule, type_name: str) -> Rule:
    return lambda value: (
        ""
        if isinstance(value, list) and not any(map(rule, value))
        else f"it must be a list of {type_name}"
    )


def _check_map(value: object) -> str:
    if isinstance(value, dict):
        wrong_keys = [key for key, map_value in value.items() if not isinstance(map_value, str)]
    else:
        wrong_keys = [""]
    if wrong_keys:
        return (
            "it must be a mapping of"
            f" texts{f', but {wrong_keys[0]} is not a text' * bool(wrong_keys[0])}. {QUOTE_HINT}"
        )
    return ""


def _make_number_rule(min_value: int, max_value: int, allows_text: bool = False) -> Rule:
    """Return the rule for an integer. `allows_text`: also allow a text that contains an integer or
    tags, as in Kubernetes' type IntOrString."""
    range_text = {INT32_RANGE: "", INT64_RANGE: ""}.get(
        (min_value, max_value), f" from {min_value} to {max_value}"
    )

    def rule(value: Any) -> str:
        if allows_text and isinstance(value, str):
            if "{{" in value:
                return ""
            if re.fullmatch(r"[+-]?[0-9]{1,20}", value):
                value = int(value)

        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not value % 1
            and min_value <= value <= max_value
        ):
            return ""
        return f"it must be a whole number{range_text}"

    return rule


def _check_duration(value: object) -> str:
    if not isinstance(value, str):
        return f"it must be a text like 1m30s. {QUOTE_HINT}"
    try:
        if (
            value
            and "{{" not in value
            and not -MAX_DURATION_S <= parse_seconds(value) <= MAX_DURATION_S
        ):
            return f"it must be a duration of at most {MAX_DURATION_S} seconds"
    except ValueError as error:
        return f"{error}. Write it like 1m30s"
    return ""


def _check_timeout(value: Any) -> str:
    problem = _check_duration(value)
    if problem or not INTEGER.fullmatch(value):
        return problem
    return "give a unit, as in 30s"


def _check_quantities(value: object) -> str:
    if not isinstance(value, dict):
        return "it must be a mapping"

    for resource_name, quantity_text in value.items():
        try:
            quantity = parse_quantity(quantity_text)
        except ValueError as error:
            return (
                f"{error}: {resource_name} must be like 2 or 512Mi, without tags (podSpecPatch may have"
                " them)"
            )

        if quantity < 0:
            return f"{resource_name} must not be negative"

    return ""


def _make_choice_rule(*choices: str) -> Rule:
    requirement = f"it must be one of {', '.join(filter(None, choices))}"
    return lambda value: "" if isinstance(value, str) and value in choices else requirement


_check_text = _make_type_rule(str, f"a text. {QUOTE_HINT}")
# the value of a parameter may be a number or a boolean, because Argo converts it to a string
_check_scalar = _make_type_rule(str | int | float, f"a text. {QUOTE_HINT}")
RULE_BY_TYPE: dict[str, Rule] = {
    "text": _check_text,
    "nonempty": lambda value: _check_text(value) or ("" if value else "it must not be empty"),
    "texts": _make_list_rule(_check_text, f"texts. {QUOTE_HINT}"),
    "scalar": _check_scalar,
    "scalars": _make_list_rule(_check_scalar, "texts"),
    "bool": _make_type_rule(bool, "true or false"),
    "list": _make_type_rule(list, "a list"),
    "map": _check_map,
    "int32": _make_number_rule(*INT32_RANGE),
    "int64": _make_number_rule(*INT64_RANGE),
    "atleast1": _make_number_rule(1, INT64_RANGE[1]),
    "seconds": _make_number_rule(0, MAX_DURATION_S),
    "mode": _make_number_rule(0, 0o777),
    "intstr": _make_number_rule(*INT32_RANGE, allows_text=True),
    "deadline": _make_number_rule(0, INT32_RANGE[1], allows_text=True),
    "port": _make_type_rule(int | str, "a number or a name"),
    "duration": _check_duration,
    "timeout": _check_timeout,
    "quantities": _check_quantities,
    "policy": _make_choice_rule(*RETRY_POLICIES),
    "gc": _make_choice_rule(*ARTIFACT_GC_STRATEGIES),
    "concurrency": _make_choice_rule("Allow", "Forbid", "Replace", ""),
    "downward": _make_choice_rule(*DOWNWARD_API_FIELDS),
}


def find_ignored_fields(value: object, type_name: str, path: str) -> Iterator[str]:
    """Yield the name of every field that is ignored on this machine. Raises ConfigError for a field
    that is unsupported, of a wrong type, or missing. `type_name`: a type of objects in FIELD_TABLE,
    or such a type X as [X] (list) or {X} (map)."""
    if type_name.startswith("["):
        if not isinstance(value, list):
            raise ConfigError(f"{path} is {value!r:.200}: it must be a list.")

        for index, child_value in enumerate(value):
            yield from find_ignored_fields(
                _require(child_value, f"{path}[{index}]"), type_name[1:-1], f"{path}[{index}]"
            )

        return

    if type_name.startswith("{") and isinstance(value, dict):
        for key, child_value in value.items():
            yield from find_ignored_fields(
                _require(child_value, f"{path}.{key}"), type_name[1:-1], f"{path}.{key}"
            )

        return

    if not isinstance(value, dict | None):
        raise ConfigError(f"{path} is {value!r:.200}: it must be an object.")

    type_name = type_name.strip("{}")
    for key, child_value in (value or {}).items():
        field_path = f"{path}.{key}" if path else key
        field_label = field_path if path else f"{key} of the {type_name}"
        field_rule = TABLES[type_name].get(key)
        field_type = FIELD_TYPES[type_name].get(key, "")

        if field_rule is None:
            hint = (
                suggest_similar(key, set(TABLES[type_name]))
                or " Remove it, or submit to a cluster."
            )
            raise ConfigError(f"{field_label} is not supported by the local runner.{hint}")

        if field_rule == "!" and child_value:
            raise ConfigError(
                f"{field_path} is not supported by the local runner: {REASONS_UNSUPPORTED[key]}."
            )

        if field_type.strip("[]{}") in TABLES:
            yield from find_ignored_fields(child_value, field_type, field_path)
        elif (
            child_value is not None
            and field_type in RULE_BY_TYPE
            and (problem := RULE_BY_TYPE[field_type](child_value))
        ):
            raise ConfigError(f"{field_label} is {child_value!r:.200}: {problem}.")

        # programs write empty fields that their users have not set
        if field_rule == "-" and child_value not in (None, "", {}, []):
            yield key

    for key in REQUIRED_FIELDS[type_name]:
        if (value or {}).get(key) is None:
            raise ConfigError(f"{path}.{key} is missing: set it.".removeprefix("."))


def check_types(value: object, type_name: str, path: str) -> None:
    """Raise ValueError for a value of a wrong type, or a missing field. Fields that are unknown or
    unsupported are accepted. `type_name`: a type of values or objects, or such a type X as [X]
    (list) or {X} (map)."""
    if type_name in RULE_BY_TYPE:
        # the quotes of YAML do not help with a value in a JSON file
        problem = RULE_BY_TYPE[type_name](value).removesuffix(f". {QUOTE_HINT}")
        if problem:
            raise ValueError(f"{path} is {value!r:.200}: {problem}")
    elif type_name.startswith("["):
        if not isinstance(value, list):
            raise ValueError(f"{path} is {value!r:.200}: it must be a list")
        for index, child_value in enumerate(value):
            check_types(child_value, type_name[1:-1], f"{path}[{index}]")
    elif type_name.startswith("{") or type_name in TABLES:
        if not isinstance(value, dict):
            raise ValueError(f"{path} is {value!r:.200}: it must be an object")
        field_types = FIELD_TYPES.get(type_name)
        for key, child_value in value.items():
            field_type = type_name[1:-1] if field_types is None else field_types.get(key, "")
            if child_value is not None or field_types is None:
                check_types(child_value, field_type, f"{path}.{key}")
        for key in REQUIRED_FIELDS.get(type_name, ()):
            if value.get(key) is None:
                raise ValueError(f"{path}.{key} is missing")


def _require(value: object, path: str) -> Any:
    """Return a value that is not None. Raises ConfigError if the value is None."""
    if value is None:
        raise ConfigError(f"{path} is empty: give it a value, or remove it.")
    return value

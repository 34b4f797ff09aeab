"""Can a pipeline run in this namespace? Asked of the cluster itself; each failure comes with its remedy.

    for check in check(Cluster.connect(namespace="models"), config.cluster, config.train): print(check)

Nothing is believed that can be tried: pods and a job are created (dry run), the webhook is given what it must refuse,
and a pod looks at the object store and at MLflow, and is deleted again. What may not be asked is said as a warning.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import get_args

import yaml

from rekindle.argo.names import DEFAULT_ARTIFACT_REPOSITORY
from rekindle.blocks import pod as pods
from rekindle.blocks.jobs.pytorch_job import pytorch_job
from rekindle.blocks.settings import ClusterConfig, PodName
from rekindle.cluster import platform
from rekindle.cluster.api import PODS, Cluster, Object, Resource
from rekindle.cluster.errors import ApiError
from rekindle.cluster.probe import SECONDS, inside, manifest
from rekindle.errors import Check, RekindleError, without_user
from rekindle.training.spec import TrainConfig

JOBS = Resource("kubeflow.org/v1", "pytorchjobs")
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
SECRETS, CONFIG_MAPS = Resource("v1", "secrets"), Resource("v1", "configmaps")
ACCOUNTS = Resource("v1", "serviceaccounts")
EVERY_POD = Resource("v1", "pods", namespaced=False)
SERVED = {
    "argoproj.io/v1alpha1": ("workflows", "workflowtemplates", "cronworkflows", "workflowtaskresults"),
    "kubeflow.org/v1": ("pytorchjobs",),
}
KUBERNETES, ARGO, OPERATOR = (1, 30), (3, 7), (1, 9)  # the oldest that will do; docs/cluster.md says the same
INSTALL = {
    "argoproj.io/v1alpha1": f"install Argo Workflows {ARGO[0]}.{ARGO[1]} or newer",
    "kubeflow.org/v1": f"install the Kubeflow training operator {OPERATOR[0]}.{OPERATOR[1]}",
}
CONTROLLERS = {
    "Argo's controller": ("app=workflow-controller", ARGO, INSTALL["argoproj.io/v1alpha1"]),
    "training operator": ("control-plane=kubeflow-training-operator", OPERATOR, INSTALL["kubeflow.org/v1"]),
}
# what the commands of this program do as whoever calls them: (group, resource, verbs)
YOURS = (
    ("argoproj.io", "workflows", "get list watch create update patch delete"),
    ("argoproj.io", "workflowtemplates", "get create update"),
    ("argoproj.io", "cronworkflows", "get create update"),
    ("", "pods", "get list watch create delete"),
    ("", "pods/log", "get"),
)
RENDER = "rekindle platform render -n {0} ... | kubectl apply -f -"


def check(cluster: Cluster, config: ClusterConfig, train: TrainConfig, seconds: float = SECONDS) -> list[Check]:
    """Every check, in order. A pod has to start: that takes some seconds, or minutes where its image is not there.

    What keeps one check from its end is a finding of that check, and the others go on. `seconds`: how long to wait for
    the pod.
    """
    found = [_api(cluster)]
    if not found[0].ok:
        return found
    plain = (kinds, controllers, namespace, rights, account, addresses, artifact_repository, credentials, admission)
    examined: dict[str, Callable[[Cluster, ClusterConfig], Iterable[Check]]] = {
        **{each.__name__.replace("_", " "): each for each in plain},
        "webhook": partial(webhook, train=train),
        "init container": init_container,
        "probe": partial(inside, seconds=seconds),
    }
    for name, each in examined.items():
        try:
            for one in each(cluster, config):
                found.append(one)
        except RekindleError as error:
            asked = getattr(error, "code", 0) != 403  # it is no failure not to be allowed to look
            found.append(Check(name, False, f"not checked: {error}", "Fix that, then check again.", required=asked))
    return found


def _api(cluster: Cluster) -> Check:
    try:
        version = cluster.call("GET", "/version")
    except ApiError as error:
        return Check("API server", False, str(error), "Choose a --context that answers: kubectl config get-contexts")
    known = tuple(int(re.sub(r"\D", "", version[part]) or 0) for part in ("major", "minor"))
    found = f"{cluster.server}, Kubernetes {version['gitVersion']}"
    return Check(
        "API server", known >= KUBERNETES, found, f"Kubernetes {KUBERNETES[0]}.{KUBERNETES[1]} or newer is needed."
    )


def kinds(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """The kinds that workflows are made of, in the versions that are written."""
    for api, wanted in SERVED.items():
        try:
            served = {each["name"] for each in cluster.call("GET", f"/apis/{api}")["resources"]}
        except ApiError as error:
            if error.code != 404:
                raise
            served = set()
        missing = [each for each in wanted if each not in served]
        remedy = f"What defines them is away or too old: {INSTALL[api]}."
        yield Check(api, not missing, f"no {', '.join(missing)}" if missing else ", ".join(wanted), remedy)


def controllers(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """That they run, see this namespace, and are not too old."""
    for name, (label, oldest, remedy) in CONTROLLERS.items():
        running = [each for each in cluster.listed(EVERY_POD, label) if _ready(each)]
        if not running:
            why = f"no pod with the label {label} is ready"
            yield Check(name, False, why, f"See its log (kubectl get pods -A -l {label}), or {remedy}.")
            continue
        container = running[0]["spec"]["containers"][0]
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        where, image = running[0]["metadata"]["namespace"], container["image"]
        seen = _value(words, "--managed-namespace") or _value(words, "--namespace")
        seen = seen or (where if "--namespaced" in words else "")
        version = re.search(r":v?(\d+)\.(\d+)", image)
        young = not version or (int(version[1]), int(version[2])) >= oldest
        ours = not seen or seen == cluster.namespace
        found = f"{image.rpartition('/')[2]} in {where}" + ("" if ours else f", which sees only namespace {seen}")
        yield Check(name, young and ours, found, f"Let it watch {cluster.namespace}." if young else f"{remedy}.")


def namespace(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    labels = _labels(cluster)
    enforced = labels.get("pod-security.kubernetes.io/enforce", "nothing")
    remedy = f"kubectl label namespace {cluster.namespace} pod-security.kubernetes.io/enforce=restricted"
    yield Check("PodSecurity", enforced == "restricted", f"{enforced} is enforced", remedy, required=False)


def rights(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """What you may do: each command of this program needs some of it."""
    rules = [(group, resource, verb) for group, resource, verbs in YOURS for verb in verbs.split()]
    denied = _denied(cluster, rules, "selfsubjectaccessreviews", {})
    remedy = "Ask whoever administers the cluster for a Role with these verbs, bound to you."
    yield Check("your rights", not denied, _named(denied) or f"{len(rules)} of {len(rules)} granted", remedy)


def account(cluster: Cluster, config: ClusterConfig) -> Iterator[Check]:
    """That the workflows' account is there, may do what a pipeline does, and has a token for Argo's container."""
    name = config.service_account
    remedy = RENDER.format(cluster.namespace)
    if not cluster.find(ACCOUNTS, name):
        yield Check("account", False, f"there is no ServiceAccount {name}", remedy)
        return
    rules = list(platform.rules())
    whom = {"user": f"system:serviceaccount:{cluster.namespace}:{name}"}
    try:
        denied = _denied(cluster, rules, "subjectaccessreviews", whom)
        found = _named(denied) or f"{name}: {len(rules)} of {len(rules)} rights granted"
        yield Check("account", not denied, found, remedy)
    except ApiError as error:
        yield Check("account", False, str(error), "Have an administrator run this check.", required=False)
    secret = f"{name}.service-account-token"
    token = cluster.find(SECRETS, secret)
    there = bool(token and (token.get("data") or {}).get("token"))
    yield Check("token", there, f"Secret {secret} " + ("holds one" if there else "is missing or empty"), remedy)


def addresses(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """That steps are told where things are."""
    remedy = RENDER.format(cluster.namespace)
    steps = (cluster.find(CONFIG_MAPS, pods.CONFIG_MAP) or {}).get("data") or {}
    names = ("S3_BUCKET", "MLFLOW_TRACKING_URI")
    missing = [name for name in names if not steps.get(name)]
    has = f"no {' and no '.join(missing)}" if missing else " and ".join(names)
    found = f"ConfigMap {pods.CONFIG_MAP} has {has}"
    yield Check("addresses", not missing, found, remedy)


def artifact_repository(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """That Argo is told of the same bucket."""
    steps = (cluster.find(CONFIG_MAPS, pods.CONFIG_MAP) or {}).get("data") or {}
    bucket, endpoint = _repository(cluster)
    address = without_user(steps.get("S3_ENDPOINT_URL") or "")
    wanted = steps.get("S3_BUCKET"), re.sub("^https?://", "", address).rstrip("/")
    same = bucket == wanted[0] and (endpoint == wanted[1] or (not wanted[1] and "amazonaws.com" in endpoint))
    found = f"bucket {bucket!r} at {endpoint!r}" + ("" if same else f", while steps use {wanted[0]!r} at {wanted[1]!r}")
    yield Check("artifact repository", same, found, RENDER.format(cluster.namespace))


def credentials(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """Their names only. Without a Secret pods rely on a cloud role: whether it is there shows in `object store`."""
    data = (cluster.find(SECRETS, pods.SECRET) or {}).get("data") or {}
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not data.get(name)]
    found = f"Secret {pods.SECRET} has no {' and no '.join(missing)}" if missing else f"Secret {pods.SECRET} has both"
    remedy = platform.secret(cluster.namespace) + " Not needed where pods have a cloud role."
    yield Check("credentials", not missing, found, remedy, required=False)


def admission(cluster: Cluster, config: ClusterConfig) -> Iterator[Check]:
    """A pod of each kind, as the config has it: PodSecurity, quota, LimitRange, PriorityClass and account in one."""
    for name in get_args(PodName):
        settings = config.pod(name)
        settings = settings.model_copy(update={"cpu": settings.cpu or "1"})
        try:
            cluster.create(PODS, manifest(f"rekindle-{name}", config, settings, {"main": settings.image}), dry_run=True)
        except ApiError as error:
            yield Check(f"pod of {name}", False, str(error), f"Change cluster.pods.{name}, or what refuses it.")
        else:
            yield Check(f"pod of {name}", True, "would be admitted")


def webhook(cluster: Cluster, config: ClusterConfig, train: TrainConfig) -> Iterator[Check]:
    """The job that the config asks for is taken, and one that only the webhook can find wrong is not (dry run)."""
    good = pytorch_job("rekindle-doctor", train, config, [])
    good["metadata"]["labels"] = {}
    for replica in good["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["metadata"]["labels"] = {}
    bad = json.loads(json.dumps(good).replace('"name": "pytorch"', '"name": "another"'))
    remedy = "Restart the training operator (kubectl -n kubeflow rollout restart deployment training-operator)."
    try:
        cluster.create(JOBS, good, dry_run=True)
    except ApiError as error:
        yield Check("webhook", False, str(error), remedy)
        return
    try:
        cluster.create(JOBS, bad, dry_run=True)
    except ApiError as error:
        refused = "webhook" in str(error)
        found = "takes what it must, and refuses what it must" if refused else str(error)
        yield Check("webhook", refused, found, remedy)
        return
    yield Check("webhook", False, "a job without its main container was taken: no webhook looks at jobs", remedy)


def init_container(cluster: Cluster, _: ClusterConfig) -> Iterator[Check]:
    """The one container that is not ours: under `restricted`, workers are refused unless the operator hardens it."""
    if _labels(cluster).get("pod-security.kubernetes.io/enforce") != "restricted":
        yield Check("init container", True, "not restricted here")
        return
    template = ""
    for operator in cluster.listed(EVERY_POD, CONTROLLERS["training operator"][0]):
        for volume in operator["spec"].get("volumes") or []:
            if name := (volume.get("configMap") or {}).get("name"):
                maps = cluster.within(operator["metadata"]["namespace"])
                template += "".join(((maps.find(CONFIG_MAPS, name) or {}).get("data") or {}).values())
    ok = "allowPrivilegeEscalation: false" in template
    found = "the operator has a hardened template" if ok else "the operator's own is not hardened: workers are refused"
    remedy = "rekindle platform render --operator | kubectl apply --server-side --field-manager=rekindle -f -"
    yield Check("init container", ok, found, remedy)


def _denied(
    cluster: Cluster, rules: Iterable[tuple[str, str, str]], kind: str, whom: dict[str, str]
) -> list[tuple[str, str, str]]:
    found = []
    for group, resource, verb in rules:
        resource, _, part = resource.partition("/")
        asked = {"namespace": cluster.namespace, "group": group, "resource": resource, "verb": verb}
        spec = {**whom, "resourceAttributes": asked | ({"subresource": part} if part else {})}
        answer = cluster.call("POST", f"/apis/authorization.k8s.io/v1/{kind}", {"spec": spec})
        if not answer["status"].get("allowed"):
            found.append((group, "/".join(filter(None, (resource, part))), verb))
    return found


def _named(denied: list[tuple[str, str, str]]) -> str:
    by_kind: dict[str, list[str]] = {}
    for group, resource, verb in denied:
        by_kind.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)
    return "; ".join(f"may not {', '.join(verbs)} {kind}" for kind, verbs in by_kind.items())


def _repository(cluster: Cluster) -> tuple[str, str]:
    """Bucket and endpoint of the default artifact repository of the namespace."""
    found = cluster.find(CONFIG_MAPS, "artifact-repositories") or {}
    annotations = (found.get("metadata") or {}).get("annotations") or {}
    key = annotations.get(DEFAULT_ARTIFACT_REPOSITORY, "")
    try:
        s3 = (yaml.safe_load((found.get("data") or {}).get(key, "")) or {}).get("s3") or {}
    except (yaml.YAMLError, AttributeError) as error:
        raise RekindleError(f"ConfigMap artifact-repositories, key {key}: {error}") from error
    return str(s3.get("bucket", "")), str(s3.get("endpoint", "")).rpartition("@")[2]


def _labels(cluster: Cluster) -> dict[str, str]:
    return cluster.get(NAMESPACES, cluster.namespace)["metadata"].get("labels") or {}


def _ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _value(words: list[str], flag: str) -> str:
    """The value of `--flag VALUE` or `--flag=VALUE`."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else after
    return ""

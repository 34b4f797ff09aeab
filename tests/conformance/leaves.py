"""Random leaf templates. The behaviour of a random leaf template depends on its text, never on
timing.

template, outputs = leaf(chance, "echo")     # outputs: result, p, f
"""

from collections.abc import Callable
from typing import Any

from rekindle.local.services.services import DEFAULT_BUCKET
from tests.conformance.chance import Chance

Template = dict[str, Any]
IMAGE = "python:3.11"
FACTS = (
    "007",
    "NaN",
    "True",
    "3",
    "5e-05",
    "-1",
    "''",
    "'a b'",
    "'ünï'",
    "'two\nlines'",
    '\'{"k": 1, "v": "x"}\'',
)
LISTS = ('["a", "b"]', '[{"k": 1, "v": "x"}, {"k": 2, "v": "y"}]', "[]", "[1, 2.5, true]")
# port of the only daemon of a workflow
PORT = 18347
# the ConfigMap that contains the limits of the semaphores
LIMITS = "{{workflow.name}}-limits"
UNREACHABLE_URL = "http://127.0.0.2:1"
LISTING = (
    "cd /tmp/in 2>/dev/null && find . | sort && find . -type f | sort | xargs cat || cat /tmp/in ||"
    " echo none"
)


def make_leaf(chance: Chance, kind: str) -> tuple[Template, set[str]]:
    """Return a template of the given kind, without a name, and the names of its outputs."""
    template, outputs = KINDS[kind](chance)
    template.setdefault("inputs", {})["parameters"] = [
        {
            "name": "a",
            **chance.one({"default": "x"}, {"default": ""}, {"default": "7"}, {"default": "a b"}),
        }
    ]
    if kind not in BARE_KINDS:
        _add_fields(chance, template)
    return template, outputs


def make_shell_template(text: str, **container: Any) -> Template:
    return {"container": {"image": IMAGE, "command": ["sh", "-c"], "args": [text], **container}}


def python(text: str) -> Template:
    return {"script": {"image": IMAGE, "command": ["python3"], "source": text}}


def make_echo(chance: Chance) -> tuple[Template, set[str]]:
    tag = chance.one(
        "inputs.parameters.a", "=inputs.parameters.a", "workflow.parameters.wp", "nope.at.all"
    )
    return make_shell_template(f"echo 'got {{{{{tag}}}}}'"), {"result"}


def fact(chance: Chance) -> tuple[Template, set[str]]:
    return make_shell_template(f"printf '%s\\n' {chance.one(*FACTS)}"), {"result"}


def make_list_template(chance: Chance) -> tuple[Template, set[str]]:
    return make_shell_template(f"echo '{chance.one(*LISTS)}'"), {"result", "list"}


def make_script(chance: Chance) -> tuple[Template, set[str]]:
    lines = (
        "import json\nprint(json.dumps({'a': '{{inputs.parameters.a}}', 'n': 1 + 1}))\n",
        "print(len('{{inputs.parameters.a}}'), end='')\n",
        "import sys\nsys.exit(len('{{inputs.parameters.a}}') % 3)\n",
    )
    return python(chance.one(*lines)), {"result"}


def fails(chance: Chance) -> tuple[Template, set[str]]:
    return make_shell_template(f"echo bad; exit {chance.one(1, 2, 3, 4, 64, 127, 137, 143)}"), {
        "result"
    }


def make_flaky_template(chance: Chance) -> tuple[Template, set[str]]:
    """Return a template that succeeds from some attempt on; the number of this attempt may exceed
    the limit of retries."""
    first_success = chance.one(1, 2)
    limit = chance.one("0", "1", "2", 2)
    template = make_shell_template(
        f"[ {{{{retries}}}} -ge {first_success} ] && echo ok{{{{retries}}}}"
        " {{lastRetry.exitCode}} || exit 4"
    )
    strategy: dict[str, Any] = {"limit": limit}

    if chance(40):
        strategy["retryPolicy"] = chance.one("Always", "OnFailure", "OnError", "OnTransientError")

    if chance(40):
        strategy["expression"] = chance.one(
            "asInt(lastRetry.exitCode) == 4",
            "lastRetry.exitCode != '4'",
            "lastRetry.status == 'Failed'",
            "asInt(retries) < 1",
            "lastRetry.message contains 'code 4'",
            "lastRetry.exitCode == 4",
        )

    if chance(20):
        strategy["backoff"] = {
            "duration": chance.one("1", "1s"),
            **chance.one({}, {"factor": 2, "cap": "2s"}),
        }

    return template | {"retryStrategy": strategy}, {"result"}


def parameter(chance: Chance) -> tuple[Template, set[str]]:
    text = chance.one("v1", "12", "a\\nb\\n\\n", "", '{"k": 1}', '["x"]')
    output: dict[str, Any] = {"name": "p", "valueFrom": {"path": "/tmp/o"}}
    output.update(chance.one({}, {"globalName": "g"}))
    # the template may fail, because outputs of failed steps count, too
    ending = chance.one("", "; exit 2")
    return make_shell_template(f"printf '{text}' > /tmp/o{ending}") | {
        "outputs": {"parameters": [output]}
    }, {"p"}


def make_template_with_missing_output(chance: Chance) -> tuple[Template, set[str]]:
    source = {"path": "/tmp/nothere", **chance.one({"default": "dflt"}, {"default": ""}, {})}
    code = chance.one("true", "exit 1")
    return make_shell_template(code) | {
        "outputs": {"parameters": [{"name": "p", "valueFrom": source}]}
    }, {"p"}


def file(chance: Chance) -> tuple[Template, set[str]]:
    """Return a template that writes an artifact: a file, a directory, a nested directory, a
    tarball, or nothing."""
    make = chance.one(
        "echo {{inputs.parameters.a}} > /tmp/d",
        "mkdir -p /tmp/d/s; echo 1 > /tmp/d/one; echo 2 > /tmp/d/s/two",
        "mkdir -p /tmp/d/only; echo 3 > /tmp/d/only/three",
        "mkdir -p /tmp/x; echo 4 > /tmp/x/four; tar czf /tmp/d -C /tmp x",
        "true",
    )

    artifact: dict[str, Any] = {"name": "f", "path": "/tmp/d"}

    artifact.update(
        chance.one(
            {}, {}, {"archive": {"none": {}}}, {"archive": {"zip": {}}}, {"archive": {"tar": {}}}
        )
    )

    artifact.update(chance.one({}, {"optional": True}))

    return make_shell_template(make) | {"outputs": {"artifacts": [artifact]}}, {"f"}


def make_reader(chance: Chance) -> tuple[Template, set[str]]:
    artifact: dict[str, Any] = {"name": "f", "path": "/tmp/in"}
    artifact.update(chance.one({}, {"optional": True}, {"archive": {"none": {}}}, {"mode": 0o700}))
    if "archive" in artifact:
        listing = "cat /tmp/in | head -c 2 | od -c"
    else:
        listing = LISTING
    return make_shell_template(listing) | {"inputs": {"artifacts": [artifact]}}, {"result"}


def raw(chance: Chance) -> tuple[Template, set[str]]:
    data = chance.one("some text\n", "{{inputs.parameters.a}}", "")
    artifact = {
        "name": "r",
        "path": "/tmp/in",
        "raw": {"data": data},
        **chance.one({}, {"mode": 0o755}),
    }
    return make_shell_template("cat /tmp/in; stat -c %a /tmp/in") | {
        "inputs": {"artifacts": [artifact]}
    }, {"result"}


def environment(chance: Chance) -> tuple[Template, set[str]]:
    env = [
        {"name": "A", "value": "{{inputs.parameters.a}}"},
        {"name": "B", "value": "$(A)-$(NO)-$$(A)"},
    ]
    env += chance.one(
        [], [{"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    )
    return make_shell_template('echo "$A|$B|$C"', env=env), {"result"}


def suspend(chance: Chance) -> tuple[Template, set[str]]:
    """Return a suspend template; an output that is not supplied gets its default, if it has one."""
    template: Template = {"suspend": {"duration": chance.one("1", "2s", "1s")}}
    if not chance(40):
        return template, set()
    source = {"supplied": {}, **chance.one({"default": "d"}, {"default": ""}, {})}
    output = {
        "name": chance.one("p", "p", "a"),
        "valueFrom": source,
    }  # the default of an input with this name applies, too
    return template | {"outputs": {"parameters": [output]}}, (
        {"p"} if output["name"] == "p" else set()
    )


def make_daemon(chance: Chance) -> tuple[Template, set[str]]:
    """Return a daemon template, which runs until the enclosing template ends, and which may serve a
    file by HTTP."""
    retried = chance.one({}, {}, {"retryStrategy": {"limit": "1"}})
    if not chance(60):
        return make_shell_template("sleep 1000") | {"daemon": True} | retried, set()
    serve = f"mkdir -p /tmp/w; cd /tmp/w; printf 'one\\n' > one; exec python3 -m http.server {PORT}"
    probe = chance.one({"httpGet": {"path": "/one", "port": PORT}}, {"tcpSocket": {"port": PORT}})
    return make_shell_template(serve, readinessProbe={**probe, "periodSeconds": 1}) | {
        "daemon": True
    } | retried, {"serves"}


def asks(chance: Chance) -> tuple[Template, set[str]]:
    """Return a template that sends an HTTP request to the address in its parameter, or to an
    unreachable address."""
    http: dict[str, Any] = {
        "url": chance.one(
            "{{inputs.parameters.a}}", "{{inputs.parameters.a}}", f"{UNREACHABLE_URL}/x"
        )
    }

    http.update(
        chance.one(
            {}, {}, {"method": "HEAD"}, {"headers": [{"name": "X-A", "value": "{{workflow.name}}"}]}
        )
    )

    conditions = (
        "response.statusCode == 200",
        "response.body contains 'one'",
        "response.statusCode == 404",
        "nope +",
    )

    http.update(chance.one({}, {}, {"successCondition": chance.one(*conditions)}))

    return {"http": http}, {"result"}


def listing(chance: Chance) -> tuple[Template, set[str]]:
    """Return a data template that lists the artifact keys of an earlier step; the caller sets the
    prefix of the keys."""
    expressions = (
        "map(data, {split(#, '/')[1]})",
        "filter(data, {# endsWith 'f'})",
        "len(data)",
        "data[0]",
        "data.nope",
        "sort(map(data, {len(split(#, '/'))}))",
    )
    steps = [{"expression": chance.one(*expressions)} for _ in range(chance.one(1, 1, 2))]
    source = {"artifactPaths": {"name": "f", "s3": {"bucket": DEFAULT_BUCKET, "key": ""}}}
    return {"data": {"source": source, "transformation": steps}}, {"result"}


def make_sidecar_template(chance: Chance) -> tuple[Template, set[str]]:
    """Return a template with an init container that shares a volume, and a sidecar that never ends
    by itself."""
    mounts = [{"name": "work", "mountPath": "/work"}]
    code = chance.one(0, 0, 5)
    prepare = {"name": "prepare", "image": IMAGE, "command": ["sh", "-c"], "volumeMounts": mounts}
    sidecar = {"name": "beside", "image": IMAGE, "command": ["sh", "-c"], "args": ["sleep 1000"]}
    template = make_shell_template("cat /work/x", volumeMounts=mounts) | {
        "volumes": [{"name": "work", "emptyDir": {}}]
    }
    template["initContainers"] = [prepare | {"args": [f"echo made > /work/x; exit {code}"]}]
    return template | chance.one({}, {"sidecars": [sidecar]}), {"result"}


def make_container_set(chance: Chance) -> tuple[Template, set[str]]:
    """Return a containerSet template whose containers run one after another."""
    code = chance.one(0, 0, 3)

    first = {
        "name": "first",
        "image": IMAGE,
        "command": ["sh", "-c"],
        "args": [f"echo 1; exit {code}"],
    }

    main_container = {
        "name": "main",
        "image": IMAGE,
        "command": ["sh", "-c"],
        "args": ["echo '{{inputs.parameters.a}}'"],
    }

    return {
        "containerSet": {"containers": [first, main_container | {"dependencies": ["first"]}]}
    }, {"result"}


def resource(chance: Chance) -> tuple[Template, set[str]]:
    # the name is unique, because the items of a loop run in parallel
    name = f"{chance.one('x', 'y')}-of-{{{{pod.name}}}}"
    data = "v {{inputs.parameters.a}}"
    manifest = (
        f"{{apiVersion: v1, kind: ConfigMap, metadata: {{name: '{name}'}}, data: {{x: '{data}'}}}}"
    )
    condition = chance.one({}, {"successCondition": "data.x"})
    condition.update(chance.one({}, {"failureCondition": "data.y"}) if condition else {})
    output = {"name": "p", "valueFrom": {"jsonPath": "{.data.x}"}}
    return {
        "resource": {"action": "apply", "manifest": manifest, **condition},
        "outputs": {"parameters": [output]},
    }, {"p"}


def late(chance: Chance) -> tuple[Template, set[str]]:
    return make_shell_template("sleep 300") | {"activeDeadlineSeconds": 8}, set()


# kind of a leaf → function that makes a template of this kindand the names of its outputs
KINDS: dict[str, Callable[[Chance], tuple[Template, set[str]]]] = {
    "echo": make_echo,
    "fact": fact,
    "listed": make_list_template,
    "script": make_script,
    "fails": fails,
    "flaky": make_flaky_template,
    "parameter": parameter,
    "missing": make_template_with_missing_output,
    "file": file,
    "reader": make_reader,
    "raw": raw,
    "environment": environment,
    "suspend": suspend,
    "companions": make_sidecar_template,
    "containers": make_container_set,
    "resource": resource,
    "late": late,
    "daemon": make_daemon,
    "asks": asks,
    "listing": listing,
}
COMMON = ("echo", "fact", "listed", "script", "fails", "flaky", "parameter", "missing")
RARE_KINDS = ("raw", "environment", "suspend", "companions", "containers", "resource")
BARE_KINDS = (
    "suspend",
    "resource",
    "late",
    "companions",
    "containers",
    "daemon",
    "asks",
    "listing",
)


def _add_fields(chance: Chance, template: Template) -> None:
    """Add random fields to a template that templates of any pod may have."""
    if chance(8):
        template["memoize"] = {
            "key": chance.one("{{workflow.name}}-k", "{{workflow.name}}-{{inputs.parameters.a}}"),
            "maxAge": "1h",
            "cache": {"configMap": {"name": "memos-{{workflow.name}}"}},
        }

    if chance(12):
        key = chance.one("one", "two", "one", "two", "text", "none", "nope")
        semaphore = {"configMapKeyRef": {"name": LIMITS, "key": key}}
        template["synchronization"] = chance.one(
            {"mutexes": [{"name": "{{workflow.name}}-m"}]}, {"semaphores": [semaphore]}
        )

    if chance(6) and "retryStrategy" not in template:
        template["retryStrategy"] = {
            "limit": chance.one("1", 1, "0"),
            **chance.one({}, {"retryPolicy": "Always"}),
        }

    if chance(5):
        template.update(chance.one({"timeout": "10m"}, {"activeDeadlineSeconds": 600}))

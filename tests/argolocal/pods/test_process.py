"""Tests of a container as a process: its environment and its files are correct, and an error of a
pod does not end the runner."""

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.processes import read_start_ticks
from argolocal.controllers.controller import Controller
from argolocal.manifest.pod_patch import apply_patches
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from rekindle import project
from tests import builders
from tests.argolocal.running import execute_manifest
from tests.builders import make_shell_container

needs_namespaces = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)


def run_template(template: dict[str, Any], home: Path, **spec: Any) -> dict[str, Any]:
    return execute_manifest(
        builders.make_workflow({"name": "main", **template}, **spec), {}, LocalCluster(home)
    )


def read_log(home: Path) -> str:
    return (home / "runs/w/logs/w.log").read_text()


def test_variables_of_a_configmap_exclude_its_binary_data(tmp_path: Path) -> None:
    objects = Controller(LocalCluster(tmp_path), "ConfigMap")
    objects.apply(
        {
            "kind": "ConfigMap",
            "metadata": {"name": "c"},
            "data": {"A": "1"},
            "binaryData": {"B": "AAE="},
        }
    )

    source = {"envFrom": [{"configMapRef": {"name": "c"}}]}
    assert (
        run_template({"container": make_shell_container("echo $A-${B-none}", **source)}, tmp_path)[
            "phase"
        ]
        == "Succeeded"
    )
    assert read_log(tmp_path) == "1-none\n"


@pytest.mark.parametrize(
    ("container", "phase", "message"),
    [
        ({"env": [{"name": "A=B", "value": "1"}]}, "Error", "main.env[0] is 'A=B'"),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "", "value": "1"}]},
            "Error",
            "main.env[1] is ''",
        ),
        (
            {"env": [{"name": "A", "value": "x\0"}]},
            "Failed",
            "StartError (exit code 128): A contains a NUL byte",
        ),
        (
            {"args": ["a\0b"]},
            "Failed",
            "main: StartError (exit code 128): an argument contains a NUL byte",
        ),
        (
            {"workingDir": "/new/" + "x" * 300},
            "Failed",
            "main: StartError (exit code 128): mkdir /new/xxx",
        ),
        (
            {"workingDir": "/tmp/\0"},
            "Failed",
            "main: StartError (exit code 128): workingDir contains a NUL byte",
        ),
        (
            {"workingDir": "here"},
            "Failed",
            "StartError (exit code 128): the working directory 'here' is not an absolute",
        ),
        (
            {"workingDir": "/proc/new"},
            "Error",
            "the working directory /proc/new cannot be created here",
        ),
        (
            {"command": ["nowhere"]},
            "Failed",
            "main: Error (exit code 64): failed to find name in PATH",
        ),
    ],
)
def test_a_container_that_cannot_start_ends_only_its_node(
    tmp_path: Path, container: dict[str, Any], phase: str, message: str
) -> None:
    status = run_template({"container": make_shell_container("true", **container)}, tmp_path)
    assert status["phase"] == phase, status["message"]
    assert message in status["message"], status["message"]


def test_the_termination_message_is_in_the_failure_message(tmp_path: Path) -> None:
    script = "printf 'out of %s' space > $ARGOLOCAL_TERMINATION_LOG; exit 3"
    assert (
        run_template({"container": make_shell_container(script)}, tmp_path)["message"]
        == "main: Error (exit code 3): out of space"
    )


@needs_namespaces
@pytest.mark.parametrize(
    ("init", "message"),
    [
        (
            {"env": [{"name": "A", "value": "\0"}]},
            "StartError (exit code 128): A contains a NUL byte: '\\x00'",
        ),
        ({"command": ["nowhere"]}, "StartError (exit code 128)"),
    ],
)
def test_an_init_container_that_cannot_start_is_named_and_leaves_no_process(
    tmp_path: Path, init: dict[str, Any], message: str
) -> None:
    status = run_template(
        {
            "initContainers": [{"name": "first", **make_shell_container("true", **init)}],
            "container": make_shell_container("true"),
        },
        tmp_path,
    )
    assert status["phase"] == "Failed", status["message"]
    assert status["message"].startswith(f"first: {message}"), status["message"]


@needs_namespaces
def test_a_script_runs_after_its_init_containers(tmp_path: Path) -> None:
    script = {"image": "busybox", "command": ["sh"], "source": "echo done"}
    status = run_template(
        {"initContainers": [{"name": "first", **make_shell_container("true")}], "script": script},
        tmp_path,
    )
    assert status["phase"] == "Succeeded"
    assert read_log(tmp_path) == "done\n"


@pytest.mark.parametrize(
    "strategy",
    [
        {"limit": "{{inputs.parameters.x}}"},
        {"backoff": {"duration": "1s", "factor": "{{inputs.parameters.x}}"}},
    ],
)
def test_a_number_of_retries_that_is_invalid_after_substitution_ends_the_node(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    inputs = {"parameters": [{"name": "x", "value": ".inf"}]}
    status = run_template(
        {"inputs": inputs, "retryStrategy": strategy, "container": make_shell_container("exit 1")},
        tmp_path,
    )
    assert status["phase"] == "Error"
    assert status["message"].split(": ")[1] == "value '.inf' cannot be resolved to an int"


@needs_namespaces
@pytest.mark.parametrize(
    "directory", ["/nowhere/new", "/usr/src/app/deep", "/tmp/rekindle-new", "/opt/new"]
)
def test_a_missing_working_directory_is_created_for_the_pod_only(
    tmp_path: Path, directory: str
) -> None:
    container = make_shell_container(
        "pwd; echo x > file; cat file {{outputs.parameters.p.path}}", workingDir=directory
    )
    container["args"][0] = "echo out > {{outputs.parameters.p.path}}; " + container["args"][0]
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "/tmp/p"}}]}
    status = run_template({"container": container, "outputs": outputs}, tmp_path)
    assert status["phase"] == "Succeeded", status
    assert read_log(tmp_path) == f"{directory}\nx\nout\n", status
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "out"
    assert not Path(directory).exists()


@needs_namespaces
@pytest.mark.parametrize("paths", [[], ["/tmp/p"], ["/usr/p"], ["/p"]])
def test_a_pod_cannot_delete_files_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str]
) -> None:
    machine_file = Path.cwd() / f".marker-{uuid.uuid4()}"
    code = tmp_path / "workloads"
    code.mkdir()
    (code / "mine.py").write_text("")
    machine_file.write_text("")
    # the code is in a folder below /tmp, which the pod sees although its /tmp is private
    monkeypatch.setenv("REKINDLE_PATH", str(code))
    file = shlex.quote(str(machine_file))
    source = (
        f"ls {file} {code}; rm -rf {file} {code}; rm -rf /tmp/*; ls {file}; find /tmp -path"
        " '*/etc/passwd'"
    )
    outputs = {
        "parameters": [{"name": "p", "valueFrom": {"path": path, "default": ""}} for path in paths]
    }

    try:
        assert (
            run_template({"container": make_shell_container(source), "outputs": outputs}, tmp_path)[
                "phase"
            ]
            == "Succeeded"
        )
        assert machine_file.exists()
        assert (code / "mine.py").exists()
    finally:
        machine_file.unlink()

    log_text = read_log(tmp_path)
    assert f"{machine_file}\n" in log_text
    assert "mine.py\n" in log_text
    assert "/etc/passwd" not in log_text, "the pod's own root must not lead back to the machine"


@needs_namespaces
@pytest.mark.parametrize("link", ["/tmp/secret", "secret", "../tmp/secret", "/tmp/on/secret"])
def test_a_link_to_an_output_is_followed_within_the_pod(tmp_path: Path, link: str) -> None:
    source = f"echo mine > /tmp/secret; ln -s /tmp /tmp/on; ln -s {link} /tmp/p"
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "/tmp/p"}}]}
    status = run_template({"container": make_shell_container(source), "outputs": outputs}, tmp_path)
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "mine", status


def output_value(status: dict[str, Any]) -> str:
    return status["nodes"]["w"]["outputs"]["parameters"][0]["value"]


P_OUTPUTS = {"parameters": [{"name": "p", "valueFrom": {"path": "/tmp/p"}}]}


@needs_namespaces
@pytest.mark.parametrize("path", ["", "/v", "/mnt/v"])
def test_an_output_behind_a_link_is_never_a_file_of_the_machine(tmp_path: Path, path: str) -> None:
    if path:
        mounts = {"volumeMounts": [{"name": "v", "mountPath": path}]}
    else:
        mounts = {}

    machine_file = Path.cwd() / f".marker-{uuid.uuid4()}"
    machine_file.write_text("the machine's")

    try:
        file = shlex.quote(str(machine_file))
        source = f"echo the pod\\'s > {file}; ln -s {file} /tmp/p"
        template = {
            "container": make_shell_container(source, **mounts),
            "outputs": P_OUTPUTS,
            "volumes": [{"name": "v", "emptyDir": {}}],
        }
        status = run_template(template, tmp_path)
    finally:
        machine_file.unlink()

    # if one overlay covers the whole file system, the runner can read the changed file from this
    # overlay
    is_readable = filesystem._supports_root_overlay() and not machine_file.is_relative_to("/tmp")
    assert (
        output_value(status) == "the pod's" if is_readable else "no such file" in status["message"]
    )


@needs_namespaces
@pytest.mark.parametrize("folder_name", ["input", "mount"])
def test_the_runner_does_not_follow_a_link_in_a_volume(tmp_path: Path, folder_name: str) -> None:
    machine_folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".marker-"))
    (tmp_path / "claims/c").mkdir(parents=True)
    (tmp_path / "claims/c/link").symlink_to(machine_folder)
    Controller(LocalCluster(tmp_path), "PersistentVolumeClaim").apply(
        {"kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": {}}
    )

    if folder_name == "input":
        artifact = {"name": "a", "path": "/v/link/x", "raw": {"data": "1"}}
    else:
        artifact = None

    if folder_name == "mount":
        inner_mounts = [{"name": "e", "mountPath": "/v/link/x"}]
    else:
        inner_mounts = []

    template = {
        "inputs": {"artifacts": [artifact] if artifact else []},
        "container": make_shell_container(
            "true", volumeMounts=[{"name": "v", "mountPath": "/v"}, *inner_mounts]
        ),
        "volumes": [
            {"name": "v", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "e", "emptyDir": {}},
        ],
    }

    phase = run_template(template, tmp_path)["phase"]
    # the directory /tmp is private to the pod
    assert phase == "Error" or (folder_name == "input" and str(machine_folder).startswith("/tmp"))
    # the command fails unless the directory is empty
    machine_folder.rmdir()


@needs_namespaces
@pytest.mark.parametrize(
    ("source", "path", "found_path"),
    [
        (
            "mkdir -p /usr/local/rekindle-x; echo 1 > /usr/local/rekindle-x/f",
            "/usr/local/rekindle-x/f",
            "1",
        ),
        ("ls -d /var/cache /var/tmp > /var/tmp/x", "/var/tmp/x", "/var/cache\n/var/tmp"),
        ("stat -c %a /tmp > /tmp/x", "/tmp/x", "1777"),
        ("mkdir -p /tmp/x/y; echo 1 > /tmp/x/y/f; chmod 555 /tmp/x/y", "/tmp/x/y/f", "1"),
    ],
)
def test_declared_output_files_have_the_same_path_as_in_a_container(
    tmp_path: Path, source: str, path: str, found_path: str
) -> None:
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": path}}]}
    assert (
        output_value(
            run_template({"container": make_shell_container(source), "outputs": outputs}, tmp_path)
        )
        == found_path
    )
    assert not Path(path).exists() or path == "/tmp/x"


@needs_namespaces
@pytest.mark.parametrize("directory", ["/work", "/tmp", "/usr/share", ""])
def test_the_path_of_an_output_may_be_relative_to_the_working_directory(
    tmp_path: Path, directory: str
) -> None:
    container_fields = {"workingDir": directory} if directory else {}
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "a/x"}}]}
    status = run_template(
        {
            "container": make_shell_container("mkdir a; echo 1 > a/x", **container_fields),
            "outputs": outputs,
        },
        tmp_path,
    )
    assert output_value(status) == "1"
    assert not Path(directory or "/", "a").exists()


@needs_namespaces
def test_an_output_below_a_sub_path_with_a_variable_is_found(tmp_path: Path) -> None:
    mount = {"name": "v", "mountPath": "/v", "subPathExpr": "$(A)/b"}
    container = make_shell_container(
        "echo 1 > /v/p", volumeMounts=[mount], env=[{"name": "A", "value": "a"}]
    )
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "/v/p"}}]}
    template = {
        "container": container,
        "outputs": outputs,
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    assert output_value(run_template(template, tmp_path)) == "1"


@needs_namespaces
def test_an_input_below_a_sub_path_with_a_variable_is_found(tmp_path: Path) -> None:
    mount = {"name": "v", "mountPath": "/v", "subPathExpr": "$(A)/b"}
    container = make_shell_container(
        "cp /v/in /tmp/p", volumeMounts=[mount], env=[{"name": "A", "value": "a"}]
    )
    inputs = {"artifacts": [{"name": "in", "path": "/v/in", "raw": {"data": "1"}}]}
    template = {
        "container": container,
        "inputs": inputs,
        "outputs": P_OUTPUTS,
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    assert output_value(run_template(template, tmp_path)) == "1"


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_mounts_below_an_import_folder_are_visible_in_pods(tmp_path: Path) -> None:
    import_folder = Path(tempfile.mkdtemp(dir="/tmp"))
    (import_folder / "m").mkdir()

    manifest = builders.make_workflow(
        {"name": "main", "container": make_shell_container(f"test $(cat {import_folder}/m/x) = 1")}
    )

    (tmp_path / "w.json").write_text(json.dumps(manifest))
    run = f"{shlex.quote(str(Path(sys.executable).with_name('rekindle')))} run --manifest w.json"
    script = f"mount -t tmpfs x {import_folder}/m && echo 1 > {import_folder}/m/x && {run}"

    environment = {
        **os.environ,
        "REKINDLE_HOME": str(tmp_path / "home"),
        "REKINDLE_PATH": str(import_folder),
    }

    process = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True
    )
    shutil.rmtree(import_folder)
    assert process.returncode == 0, process.stderr


@needs_namespaces
def test_a_retry_does_not_write_through_a_link_of_an_earlier_attempt(tmp_path: Path) -> None:
    machine_folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".marker-"))
    mode_before = machine_folder.stat().st_mode
    root = tmp_path / "root"
    root.mkdir()
    (root / "tmp").symlink_to(machine_folder)
    filesystem.FileSystemView(root, []).prepare([])
    mode_after = machine_folder.stat().st_mode
    machine_folder.rmdir()
    assert mode_before == mode_after
    assert not (root / "tmp").is_symlink()


@needs_namespaces
def test_a_home_may_have_any_name(tmp_path: Path) -> None:
    status = run_template(
        {"container": make_shell_container("echo 1 > /tmp/p"), "outputs": P_OUTPUTS},
        tmp_path / "a,b\\c:d e",
    )
    assert output_value(status) == "1"


@needs_namespaces
def test_the_working_directory_of_the_runner_does_not_hide_files_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/tmp")
    status = run_template(
        {
            "container": make_shell_container("ls /tmp > /tmp/p; echo end >> /tmp/p"),
            "outputs": P_OUTPUTS,
        },
        tmp_path,
    )
    assert "pytest" not in output_value(status)
    assert output_value(status).endswith("end")


@needs_namespaces
@pytest.mark.parametrize(
    "source", ["mkfifo /tmp/p", "ln -s /dev/zero /tmp/p", "ln -s p /tmp/p", "mkdir /tmp/p"]
)
def test_an_output_that_is_not_a_file_is_an_error(tmp_path: Path, source: str) -> None:
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "/tmp/p"}}]}
    status = run_template({"container": make_shell_container(source), "outputs": outputs}, tmp_path)
    assert status["phase"] == "Error", status
    assert "outputs/parameters/tmp/p: no such file" in status["message"], status


def test_only_one_newline_is_removed_from_the_end_of_an_output(tmp_path: Path) -> None:
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "/tmp/p"}}]}
    source = r"printf 'a\r\n\r\n' > {{outputs.parameters.p.path}}"
    status = run_template({"container": make_shell_container(source), "outputs": outputs}, tmp_path)
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "a\r\n\r", status


def test_processes_in_a_new_session_end_with_the_run(tmp_path: Path) -> None:
    source = "setsid sleep 1000 > /dev/null 2>&1 & echo $!; sleep 0.3"
    assert (
        run_template({"container": make_shell_container(source)}, tmp_path)["phase"] == "Succeeded"
    )
    assert read_start_ticks(int(read_log(tmp_path))) is None


@needs_namespaces
def test_a_working_directory_in_a_volume_is_created(tmp_path: Path) -> None:
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/v"}], "workingDir": "/v/new"}
    outputs = {"parameters": [{"name": "p", "valueFrom": {"path": "/v/new/p"}}]}
    volumes = [{"name": "v", "emptyDir": {}}]
    status = run_template(
        {
            "container": make_shell_container("echo x > p", **mount),
            "outputs": outputs,
            "volumes": volumes,
        },
        tmp_path,
    )
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "x", status


def test_pod_spec_patches_of_a_workflow_and_a_template_set_variables(tmp_path: Path) -> None:
    patch = (
        "containers: [{name: main, resources: {}, env: [{name: %s, value: '%s'}, {name: B, value:"
        " '{{pod.name}}'}]}]"
    )
    template = {
        "podSpecPatch": patch % ("A", "$(C)2"),
        "container": make_shell_container("echo $A $B $C $D"),
    }
    template["container"]["env"] = [{"name": "C", "value": "c"}, {"name": "A", "value": "0"}]
    workflow = {
        "podSpecPatch": patch % ("D", "{{workflow.parameters.x}}"),
        "arguments": {"parameters": [PARAMETER]},
    }
    assert run_template(template, tmp_path, **workflow)["phase"] == "Succeeded"
    assert read_log(tmp_path) == "c2 w c d\n"


PARAMETER = {"name": "x", "value": "d"}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            "activeDeadlineSeconds: 1",
            "Pod was active on the node longer than the specified deadline",
        ),
        (
            "{activeDeadlineSeconds: 1, terminationGracePeriodSeconds: 0}",
            "Pod was active on the node longer",
        ),
        (
            "containers: [{name: other, env: []}]",
            "Error applying PodSpecPatch: Pod is invalid: spec.containers: other",
        ),
        ("activeDeadlineSeconds: {{workflow.parameters.x}}", "activeDeadlineSeconds is 'd'"),
    ],
)
def test_a_pod_spec_patch_sets_the_grace_period(tmp_path: Path, patch: str, message: str) -> None:
    if "Grace" in patch:
        source = "trap '' TERM; sleep 1000 & wait; wait"
    else:
        source = "sleep 1000"
    template = {"podSpecPatch": patch, "container": make_shell_container(source)}
    # the patch in the template has priority over the patch in the spec
    grace = "terminationGracePeriodSeconds: 1000"
    status = run_template(
        template, tmp_path, podSpecPatch=grace, arguments={"parameters": [PARAMETER]}
    )
    assert message in status["message"], status["message"]


def test_a_patch_of_all_pods_ignores_pods_without_containers() -> None:
    patch = (
        '{"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}, {"name": "wait",'
        ' "resources": {}}]}'
    )
    assert apply_patches({"resource": {"action": "get"}}, [patch, None]) == {
        "resource": {"action": "get"}
    }
    group = {
        "containerSet": {"containers": [{"name": "main"}, {"name": "b"}]},
        "sidecars": [{"name": "s"}],
    }
    changed = apply_patches(
        group, [patch, "initContainers: []", "containers: [{name: s, env: [{name: B, value: b}]}]"]
    )
    assert changed["containerSet"]["containers"] == [
        {"name": "main", "env": [{"name": "A", "value": "1"}]},
        {"name": "b"},
    ]
    assert changed["sidecars"] == [{"name": "s", "env": [{"name": "B", "value": "b"}]}]


@pytest.mark.parametrize("field", ["activeDeadlineSeconds", "timeout"])
def test_a_deadline_that_is_invalid_after_substitution_ends_the_node(
    tmp_path: Path, field: str
) -> None:
    inputs = {"parameters": [{"name": "x", "value": "abc"}]}
    status = run_template(
        {
            "inputs": inputs,
            field: "{{inputs.parameters.x}}",
            "container": make_shell_container("true"),
        },
        tmp_path,
    )
    assert status["phase"] == "Error", status["message"]
    assert "abc" in status["message"], status["message"]


def test_a_pod_imports_only_from_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    for name in ("steps/greet.py", "pipelines/nightly.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("def main(): ...\n")

    monkeypatch.setenv(project.PATH_VARIABLE, str(folder))
    source = (
        "import sys; from rekindle import project; step = project.load_module('steps.greet', 'step',"
        " ['main']);"
    )
    source += (
        "nightly = project.load_module('pipelines.nightly', 'pipeline', ['main']); print(step.__file__,"
        " nightly.__file__);"
    )
    source += "print([folder for folder in sys.path if folder.startswith(sys.argv[1])])"

    container = {
        "image": "python",
        "command": ["python", "-c", source, str(project.REFERENCE)],
        "workingDir": "/",
    }

    assert run_template({"container": container}, tmp_path)["phase"] == "Succeeded"
    files, path = read_log(tmp_path).splitlines()
    assert files == f"{folder}/steps/greet.py {folder}/pipelines/nightly.py"
    assert str(project.REFERENCE) not in [entry.rstrip("/") for entry in ast.literal_eval(path)]

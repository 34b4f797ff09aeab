"""Runs must survive their runner, and pods must be isolated."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argolocal.common.processes import is_alive
from argolocal.common.program import POD_VARIABLE
from argolocal.errors import ConfigError
from argolocal.pods import executor, filesystem
from argolocal.pods.process import start_container
from argolocal.runner import run as local_run
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun, stop
from argolocal.state import journal as state
from tests.argolocal.runner.shell_workflows import (
    cluster_with_claim,
    make_dag_template,
    make_shell_template,
    make_shell_workflow,
    phases_by_name,
    shared_folder,
)
from tests.argolocal.running import execute_manifest, resume_run
from tests.waiting import until

PYTHON = {"image": "python:3.11", "command": ["python"]}


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return cluster_with_claim(tmp_path / ".rekindle")


def read_outcome(status: dict[str, Any]) -> Any:
    """Return the parts of a status that do not depend on the clock."""
    clock = ("startedAt", "finishedAt")
    nodes = [
        {key: value for key, value in node.items() if key not in clock}
        for node in status["nodes"].values()
    ]
    return status["phase"], status.get("outputs"), sorted(nodes, key=lambda node: node["name"])


def make_chain(name: str, seconds: float = 0.15) -> dict[str, Any]:
    """Return a workflow of four steps, which pass a number, and each write a line at their end."""
    x = "{{inputs.parameters.x}}"
    body = (
        f"sleep {seconds}; echo $(( {x} + 1 )) > {{{{outputs.parameters.out.path}}}}; echo {x} >>"
        " /shared/done"
    )
    parameters = {"parameters": [{"name": "x"}]}

    out = {
        "parameters": [
            {
                "name": "out",
                "valueFrom": {"path": "/tmp/out"},
                "globalName": "last-{{inputs.parameters.x}}",
            }
        ]
    }

    tasks = [
        {
            "name": "s0",
            "template": "add",
            "arguments": {"parameters": [{"name": "x", "value": "0"}]},
        }
    ]

    for i in range(1, 4):
        value = f"{{{{tasks.s{i - 1}.outputs.parameters.out}}}}"
        arguments = {"parameters": [{"name": "x", "value": value}]}
        tasks.append(
            {"name": f"s{i}", "template": "add", "depends": f"s{i - 1}", "arguments": arguments}
        )

    return make_shell_workflow(
        [
            make_dag_template(*tasks),
            make_shell_template("add", body, inputs=parameters, outputs=out),
            make_shell_template("bye", "true"),
        ],
        name,
        onExit="bye",
    )


RUNNER = """
import json, sys
from collections import Counter
from pathlib import Path
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
cluster = LocalCluster(Path(sys.argv[1]))
what = sys.argv[2]
new = what.endswith(".json")
run = LocalRun.create(json.loads(Path(what).read_text()), {}, cluster) if new else LocalRun.load(what, cluster)
print(run.run()["phase"])
"""


def start_runner(cluster: LocalCluster, what: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(cluster.home), str(what)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def list_pod_processes(cluster: LocalCluster) -> list[str]:
    """Return the processes of pods of this cluster's runs."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"{POD_VARIABLE}={cluster.home / 'runs'}".encode()
                in (process / "environ").read_bytes()
            ):
                processes.append((process / "cmdline").read_text())
        except OSError:
            continue
    return processes


def wait_for_no_process(cluster: LocalCluster) -> None:
    """Wait until all killed processes have exited."""
    until("every process of the run to end", lambda: list_pod_processes(cluster) == [])


def kill_at(process: subprocess.Popen[str], journal: Path, journal_bytes: float) -> None:
    """Kill a runner when the journal of its run has the size `size`, unless the runner ends
    before."""
    until(
        "its moment",
        lambda: journal.stat().st_size >= journal_bytes or process.poll() is not None,
        pause=0.001,
    )
    process.kill()
    process.wait()


@pytest.mark.parametrize("attempts", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killing_the_runner_loses_nothing_and_repeats_no_finished_step(
    tmp_path: Path, attempts: int
) -> None:
    rng = random.Random(7)
    expected = None
    written = 0

    for attempt in range(attempts):
        home = cluster_with_claim(tmp_path / f"{attempt}")
        mark_file = shared_folder(home, "done")
        journal = home.home / "runs/w/journal.jsonl"
        manifest = tmp_path / "w.json"
        manifest.write_text(json.dumps(make_chain("w")))

        if attempt == 0:
            expected = read_outcome(execute_manifest(make_chain("w"), {}, home))
            assert mark_file.read_text().split() == ["0", "1", "2", "3"]
            written = journal.stat().st_size
            continue

        process = start_runner(home, manifest)
        until("the run to begin", journal.exists)
        # step → how often it had been started when it ended
        finished_counts: dict[str, int] = {}

        for _ in range(2):  # kill the runner again while it resumes
            kill_at(process, journal, journal.stat().st_size + rng.uniform(0, written))
            run_counts = Counter(mark_file.read_text().split() if mark_file.exists() else ())
            status, _ = state.RunFiles(home.home, "w").load()
            succeeded_steps = [
                name[-1] for name, phase in phases_by_name(status).items() if phase == "Succeeded"
            ]
            finished_counts = {
                step: run_counts[step] for step in succeeded_steps if step.isdigit()
            } | finished_counts
            process = start_runner(home, "w")

        process.kill()
        process.wait()
        assert read_outcome(resume_run("w", home)) == expected
        assert all(
            mark_file.read_text().split().count(step) == run_count
            for step, run_count in finished_counts.items()
        )
        wait_for_no_process(home)


def test_a_dead_runner_leaves_no_process_once_its_run_is_resumed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    manifest = tmp_path / "w.json"
    grandchild = make_shell_workflow(
        [
            make_shell_template(
                "main",
                "echo try; if [ -e /shared/go ]; then exit 0; fi; sleep 987 & sleep 986; true",
            )
        ]
    )
    manifest.write_text(json.dumps(grandchild))
    process = start_runner(cluster, manifest)
    until(
        "its grandchild", lambda: any("987" in command for command in list_pod_processes(cluster))
    )
    process.kill()
    process.wait()
    shared_folder(cluster, "go").touch()
    assert resume_run("w", cluster)["phase"] == "Succeeded"
    wait_for_no_process(cluster)
    # only the log of the last pod is kept
    assert (cluster.home / "runs/w/logs/w.log").read_text() == "try\n"


def test_a_run_can_be_resumed_after_a_kill_during_a_pod_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = state.RunFiles(tmp_path, "w")
    files.root.mkdir(parents=True)
    asked = os.memfd_create("asked")

    holder = os.fork()
    if not holder:
        files.lock()
        # a forked child that has not yet called exec still has the lock of its dead parent
        if not os.fork():
            until("somebody to ask for the lock", lambda: os.fstat(asked).st_size)

        os._exit(0)

    os.waitpid(holder, 0)
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda *arguments: (os.write(asked, b"x"), pread(*arguments))[1]
    )
    files.lock()
    assert os.fstat(asked).st_size, "the lock was free"
    files.close()


def test_a_second_runner_of_a_run_is_rejected(cluster: LocalCluster, tmp_path: Path) -> None:
    manifest = tmp_path / "w.json"
    manifest.write_text(json.dumps(make_shell_workflow([make_shell_template("main", "sleep 30")])))
    process = start_runner(cluster, manifest)
    until("its first process", lambda: list_pod_processes(cluster))
    with pytest.raises(state.Busy, match=str(process.pid)):
        LocalRun.load("w", cluster)
    process.terminate()
    process.wait(2)


@pytest.mark.slow
def test_stop_shortens_the_grace_period_and_runs_the_exit_handler(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    manifest = tmp_path / "w.json"
    mark_file = shared_folder(cluster, "exit")

    templates = [
        make_shell_template(
            "main",
            "trap '' TERM; sleep 1000 & wait; sleep 1000",
            podSpecPatch="terminationGracePeriodSeconds: 1000",
        ),
        make_shell_template("bye", "echo {{workflow.status}} > /shared/exit"),
    ]

    manifest.write_text(json.dumps(make_shell_workflow(templates, onExit="bye")))
    process = start_runner(cluster, manifest)
    until("its first process", lambda: list_pod_processes(cluster))
    stop("w", cluster)
    assert process.wait(60) == 0
    status = state.RunFiles(cluster.home, "w").load()[0]

    assert status["phase"] == "Failed"
    assert status["message"] == "Stopped with strategy 'Stop'"
    assert mark_file.read_text() == "Failed\n"

    wait_for_no_process(cluster)

    with pytest.raises(ConfigError, match="is completed"):
        stop("w", cluster)


def test_a_stop_during_a_pod_start_ends_the_pod(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_original = start_container

    def start(*arguments: Any) -> Any:
        process = start_original(*arguments)
        # the signal is sent before the process is recorded
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(executor, "start_container", start)
    with pytest.raises(KeyboardInterrupt):
        execute_manifest(
            make_shell_workflow([make_shell_template("main", "trap '' TERM; sleep 60 & wait")]),
            {},
            cluster,
        )
    wait_for_no_process(cluster)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_ends_all_pods_and_the_run_can_be_resumed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    gate_file = shared_folder(cluster, "gate")
    command = "test -e /shared/gate || sleep 1000"
    run = LocalRun.create(
        make_shell_workflow(
            [
                make_dag_template({"name": "a", "template": "one"}),
                make_shell_template("one", command),
            ]
        ),
        {},
        cluster,
    )
    # set the handler, because in background jobs of a shell, SIGINT is ignored
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        until("its first process", lambda: list_pod_processes(cluster))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run.run()
    finally:
        signal.signal(signal.SIGINT, old_handler)

    wait_for_no_process(cluster)
    gate_file.touch()
    assert resume_run("w", cluster)["phase"] == "Succeeded"


def test_a_failed_run_resumes_from_the_failed_step(cluster: LocalCluster, tmp_path: Path) -> None:
    mark_file = shared_folder(cluster, "good")
    gate_file = shared_folder(cluster, "gate")

    tasks = [
        {"name": "good", "template": "good"},
        {"name": "bad", "template": "bad", "depends": "good"},
        {"name": "after", "template": "good", "depends": "bad"},
    ]

    steps = {"good": "echo x >> /shared/good", "bad": "test -e /shared/gate", "bye": "true"}
    templates = [
        make_dag_template(*tasks),
        *(make_shell_template(name, command) for name, command in steps.items()),
    ]
    status = execute_manifest(make_shell_workflow(templates, onExit="bye"), {}, cluster)
    assert status["phase"] == "Failed"
    assert phases_by_name(status)["w.after"] == "Omitted"
    gate_file.touch()
    status = resume_run("w", cluster)
    assert status["phase"] == "Succeeded"
    assert set(phases_by_name(status).values()) == {"Succeeded"}
    # check that the steps `good` and `after` ran once each
    assert mark_file.read_text() == "x\nx\n"


def test_a_full_disk_ends_the_run_which_can_be_resumed(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalRun.create(make_shell_workflow([make_shell_template("main", "true")]), {}, cluster)
    journal = os.open("/dev/full", os.O_WRONLY)
    os.dup2(journal, run.files.journal)
    # replace ftruncate, because /dev/full cannot be truncated
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, size: None)
    with pytest.raises(state.DiskFull, match="Free some space"):
        run.run()
    monkeypatch.undo()
    assert resume_run("w", cluster)["phase"] == "Succeeded"


def test_an_incomplete_line_of_the_journal_is_ignored(cluster: LocalCluster) -> None:
    execute_manifest(make_shell_workflow([make_shell_template("main", "true")]), {}, cluster)
    journal = cluster.home / "runs/w/journal.jsonl"
    journal.write_bytes(journal.read_bytes().rstrip(b"\n")[:-20])
    assert resume_run("w", cluster)["phase"] == "Succeeded"


def test_a_pod_sees_only_the_environment_of_its_manifest(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    objects = cluster.home / "objects/ConfigMap"
    objects.mkdir(parents=True)
    (objects / "settings.json").write_text(json.dumps({"data": {"COLOUR": "red", "SIZE": "7"}}))

    script = {
        **PYTHON,
        "source": "import json, os; print(json.dumps(dict(os.environ)))",
        "envFrom": [
            {"configMapRef": {"name": "settings"}},
            {"secretRef": {"name": "none", "optional": True}},
        ],
        "env": [
            {"name": "BOTH", "value": "$(COLOUR)-$(SIZE)-$(NOPE)-$$(SIZE)"},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
    }

    use = {
        "name": "use",
        "template": "use",
        "depends": "a",
        "arguments": {"parameters": [{"name": "x", "value": "{{tasks.a.outputs.result}}"}]},
    }

    templates = [
        make_dag_template({"name": "a", "template": "env"}, use),
        {"name": "env", "script": script},
        make_shell_template("use", "true", inputs={"parameters": [{"name": "x"}]}),
    ]

    status = execute_manifest(make_shell_workflow(templates), {}, cluster)
    node = next(node for node in status["nodes"].values() if node["name"] == "w.a")
    variables = json.loads(node["outputs"]["result"])
    assert variables["BOTH"] == "red-7-$(NOPE)-$(SIZE)"
    assert variables["NAME"] == f"w-env-{node['id'].split('-')[-1]}"
    assert variables["IP"] == "127.0.0.1"
    assert "SECRET_OF_THE_USER" not in variables


@pytest.mark.skipif(not filesystem.supports_namespaces(), reason="needs mount namespaces")
def test_pods_that_write_to_the_same_path_do_not_share_files(cluster: LocalCluster) -> None:
    out = {
        "parameters": [
            {"name": "p", "valueFrom": {"path": "/tmp/out.txt"}},
            {"name": "q", "valueFrom": {"path": "/data/q"}},
        ]
    }

    body = (
        "test ! -e /tmp/out.txt && echo {{inputs.parameters.x}} > /tmp/out.txt && sleep 0.3 && cp"
        " /tmp/out.txt /data/q"
    )

    tasks = [
        {
            "name": "t",
            "template": "one",
            "withItems": ["a", "b"],
            "arguments": {"parameters": [{"name": "x", "value": "{{item}}"}]},
        }
    ]

    status = execute_manifest(
        make_shell_workflow(
            [
                make_dag_template(*tasks),
                make_shell_template(
                    "one", body, inputs={"parameters": [{"name": "x"}]}, outputs=out
                ),
            ]
        ),
        {},
        cluster,
    )

    assert status["phase"] == "Succeeded", status

    logs = {
        n["displayName"]: [p["value"] for p in n["outputs"]["parameters"]]
        for n in status["nodes"].values()
        if n["type"] == "Pod"
    }

    assert logs == {"t(0:a)": ["a", "a"], "t(1:b)": ["b", "b"]}
    assert not Path("/tmp/out.txt").exists()


@pytest.mark.slow
def test_time_limits_end_a_pod_and_the_workflow(cluster: LocalCluster) -> None:
    tasks = [{"name": "slow", "template": "slow"}]
    status = execute_manifest(
        make_shell_workflow(
            [
                make_dag_template(*tasks),
                make_shell_template("slow", "sleep 60", activeDeadlineSeconds=1),
            ],
            "a",
        ),
        {},
        cluster,
    )
    node = status["nodes"][
        "a-"
        + next(iter(status["nodes"][i]["id"].split("-")[-1] for i in status["nodes"] if i != "a"))
    ]
    assert node["phase"] == "Failed"
    assert node["message"] == "Pod was active on the node longer than the specified deadline"
    templates = [
        make_dag_template(*tasks),
        make_shell_template("slow", "sleep 60"),
        make_shell_template("bye", "true"),
    ]
    status = execute_manifest(
        make_shell_workflow(templates, "b", activeDeadlineSeconds=1, onExit="bye"), {}, cluster
    )
    assert status["phase"] == "Failed"
    assert phases_by_name(status)["b.onExit"] == "Succeeded"
    assert "Step exceeded its deadline" in [
        node.get("message") for node in status["nodes"].values()
    ]


def test_a_retry_waits_for_its_backoff(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s = list[float]()
    clock = time.time
    wait = executor.Executor.wait

    def wait_at_once(self: executor.Executor, timeout: float | None) -> Any:
        waited_s.append(timeout or 0.0)
        return wait(self, 0.0 if timeout else timeout)

    monkeypatch.setattr(executor.Executor, "wait", wait_at_once)
    fake_time = SimpleNamespace(time=lambda: clock() + sum(waited_s), monotonic=time.monotonic)
    monkeypatch.setattr(local_run, "time", fake_time)
    retry = {"limit": 2, "backoff": {"duration": "10m", "factor": 2}}

    status = execute_manifest(
        make_shell_workflow(
            [
                make_shell_template(
                    "main",
                    "echo x >> /shared/n; test $(wc -l < /shared/n) = 3",
                    retryStrategy=retry,
                )
            ]
        ),
        {},
        cluster,
    )

    assert status["phase"] == "Succeeded"
    assert round(sum(waited_s) / 60) == 10 + 20

    assert [node["phase"] for node in status["nodes"].values()] == [
        "Succeeded",
        "Failed",
        "Failed",
        "Succeeded",
    ]


def test_a_missing_program_fails_its_step_with_the_reason(cluster: LocalCluster) -> None:
    template = {"name": "main", "container": {"image": "alpine", "command": ["no-such-program"]}}
    status = execute_manifest(make_shell_workflow([template]), {}, cluster)
    assert status["phase"] == "Failed"
    assert 'exec: "no-such-program"' in status["message"]


def test_an_invalid_manifest_starts_no_pod(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="sidecars"):
        execute_manifest(
            make_shell_workflow(
                [make_shell_template("main", "true", sidecars=[{"name": "s", "image": "nginx"}])]
            ),
            {},
            cluster,
        )
    assert not (cluster.home / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedules": ["99 99 * * *"]},
            r'spec\.schedules: "99 99 \* \* \*" is not a schedule: the minute',
        ),
        ({"timezone": "Mars/Olympus"}, r'spec\.timezone: "Mars/Olympus" is not a time zone'),
        ({"schedules": []}, r"spec\.schedules: the list is missing"),
    ],
)
def test_a_cron_workflow_that_a_cluster_rejects_does_not_run(
    cluster: LocalCluster, fields: dict[str, Any], message: str
) -> None:
    spec = {
        "schedules": ["@daily"],
        "workflowSpec": make_shell_workflow([make_shell_template("main", "true")])["spec"],
    }
    cron = {"kind": "CronWorkflow", "metadata": {"name": "c"}, "spec": spec}
    assert execute_manifest(cron, {}, cluster)["phase"] == "Succeeded"
    shutil.rmtree(cluster.home / "runs")
    with pytest.raises(ConfigError, match=message):
        execute_manifest({**cron, "spec": spec | fields}, {}, cluster)
    assert not (cluster.home / "runs").exists()


@pytest.mark.parametrize(
    "beside",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not filesystem.supports_namespaces(), reason="needs mount namespaces"
            ),
        ),
    ],
)
def test_an_image_from_a_parameter_is_checked_when_its_step_starts(
    cluster: LocalCluster, beside: bool
) -> None:
    container = {"image": "{{inputs.parameters.i}}", "command": ["sh", "-c", "true"]}
    body = {"sidecars": [{**container, "name": "s"}], "container": {**container, "image": "bash"}}

    template = {
        "name": "t",
        "inputs": {"parameters": [{"name": "i"}]},
        **(body if beside else {"container": container}),
    }

    arguments = {"parameters": [{"name": "i", "value": "{{workflow.parameters.i}}"}]}
    manifest = make_shell_workflow(
        [make_dag_template({"name": "a", "template": "t", "arguments": arguments}), template]
    )
    manifest["spec"]["arguments"] = {"parameters": [{"name": "i", "value": "alpine"}]}
    assert execute_manifest(manifest, {}, cluster)["phase"] == "Succeeded"
    status = execute_manifest({**manifest, "metadata": {"name": "other"}}, {"i": "nginx"}, cluster)
    ((phase, cause),) = [
        (n["phase"], n["message"]) for n in status["nodes"].values() if n["displayName"] == "a"
    ]
    assert status["phase"] == "Error"
    assert phase == "Error"
    assert (
        f"{'sidecars[0]' if beside else 'container'}.image is 'nginx', which this machine does not"
        " have" in cause
    )


def test_a_completed_run_leaves_no_process_or_descriptor(cluster: LocalCluster) -> None:
    execute_manifest(
        make_shell_workflow([make_shell_template("main", "true")], "first"), {}, cluster
    )
    descriptors_before = len(os.listdir("/proc/self/fd"))

    execute_manifest(
        make_shell_workflow(
            [
                make_dag_template(*({"name": f"t{i}", "template": "one"} for i in range(20))),
                make_shell_template("one", "true"),
            ]
        ),
        {},
        cluster,
    )

    assert len(os.listdir("/proc/self/fd")) == descriptors_before
    pods = [
        json.loads(line).get("pods", {})
        for line in (cluster.home / "runs/w/journal.jsonl").read_text().splitlines()
    ]
    assert not any(is_alive(*process) for pod in pods for process in pod.values() if process)

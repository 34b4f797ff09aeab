"""Tests of the command `rekindle`: output and exit codes of real processes."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from rekindle.cli import commands
from rekindle.cli.group import SECTIONS
from rekindle.training.spec import TrainConfig
from tests.rekindle.cli.processes import (
    DEMO,
    REKINDLE,
    ROOT,
    make_shell_workflow,
    run_rekindle,
    wait_until_started,
    write_manifest,
)
from tests.waiting import until

# commands that accept the scheduled time of a run
TIMED_COMMANDS = ("run", "submit", "plan")
HEAVY_MODULES = (
    "torch",
    "hera",
    "mlflow",
    "boto3",
    "polars",
    "numpy",
    "pydantic",
    "rich",
    "kubernetes",
)


def gated_workflow(verdict: str) -> dict[str, Any]:
    """Return a workflow whose gate has the given verdict."""
    manifest = make_shell_workflow(("evaluate", f"printf {verdict} > /tmp/verdict"))
    manifest["metadata"]["labels"] = {"app.kubernetes.io/part-of": "rekindle"}
    manifest["spec"]["templates"][1]["outputs"] = {
        "parameters": [
            {"name": "verdict", "valueFrom": {"path": "/tmp/verdict"}, "globalName": "verdict"}
        ]
    }
    return manifest


def test_help_imports_no_heavy_package():
    probe = (
        "import sys; from rekindle.cli import commands\n"
        "try: commands.main(['--help'])\n"
        f"except SystemExit: print('heavy:', [m for m in {HEAVY_MODULES} if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == "heavy: []"


def test_help_lists_every_command_once_with_its_complete_summary():
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(
        commands.commands
    )
    text = commands.get_help(click.Context(commands, info_name="rekindle", terminal_width=80))
    for title, names in SECTIONS.items():
        lines = text.partition(f"\n{title}:\n")[2].splitlines()[: len(names)]
        assert [line.split()[0] for line in lines] == list(names)
        assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def every_command(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{above}{name}", command
        if isinstance(command, click.Group):
            yield from every_command(command, f"{above}{name} ")


@pytest.mark.parametrize("name", dict(every_command(commands)))
def test_every_command_has_a_valid_example_and_is_in_the_docs(name: str):
    command = dict(every_command(commands))[name]
    text = command.get_help(click.Context(command, info_name=name))
    example_lines = text.partition("Example:")[2].replace("\\\n", " ")
    examples = re.findall(r"^\s+rekindle (.*)$", example_lines, re.MULTILINE)
    assert examples
    assert name in " ".join(examples)

    for example in examples:
        called: click.Command = commands
        args = shlex.split(example.partition(" | ")[0])
        while isinstance(called, click.Group):
            called = called.commands[args[0]]
            args = args[1:]

        # `--help` raises Exit
        with contextlib.suppress(click.exceptions.Exit):
            called.make_context(name, args)

    documents = "\n".join(
        path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    )
    assert f"rekindle {name}" in documents


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["rnu"], 'Did you mean "run"?'),
        (["run", "configs/dmeo.yaml"], "configs/demo.yaml"),
        (["run", DEMO, "--set", "train.wrokers=3"], 'Did you mean "workers"?'),
        (["run", DEMO, "--set", "train.workers=many"], "train.workers is 'many'"),
        (["run", DEMO, "--set", "train.workers"], "KEY=VALUE"),
        (["run"], "configs/demo.yaml"),
        (["run", DEMO, "--manifest", DEMO], "not both"),
        (["run", "--manifest", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "--manifest", DEMO], "one of Workflow"),
        (["render", DEMO, "--kind", "corn"], "cron"),
        (["status", "--watch"], "--cluster"),
        *(
            ([name, DEMO, "-p", "scheduled-time=yesterday"], "'yesterday': it must be ISO 8601")
            for name in TIMED_COMMANDS
        ),
        (["submit", DEMO], "no cluster is configured"),
        (["submit", "--dry-run"], "configs/demo.yaml"),
        (["stop", "--cluster"], "no cluster is configured"),
        (["stop", ""], "the name is empty"),
        (["resume", ""], "the name is empty"),
        (["resume", "x" * 5000], "is not the name of a run"),
        (["run", "--manifest", ""], "the path is empty"),
        (["run", ""], "the path is empty"),
    ],
)
def test_wrong_usage_or_config_exits_with_2_and_a_hint(tmp_path: Path, args: list[str], hint: str):
    result = run_rekindle(*args, cwd=ROOT, KUBECONFIG="/none", REKINDLE_HOME=str(tmp_path))
    assert result.returncode == 2
    assert result.stdout == ""
    assert hint in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_scheduled_time_is_checked_only_in_pipelines_of_rekindle(tmp_path: Path):
    arguments = {"parameters": [{"name": "scheduled-time", "value": ""}]}
    plain = write_manifest(
        tmp_path / "plain.yaml", make_shell_workflow(("a", "exit 0"), arguments=arguments)
    )
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(run_rekindle("render", DEMO, cwd=tmp_path).stdout)

    for manifest, time, code in (
        (plain, "soon", 10),
        (rendered, "soon", 2),
        (rendered, "2024-03-25", 10),
    ):
        result = run_rekindle(
            "plan", "--manifest", str(manifest), "-p", f"scheduled-time={time}", cwd=tmp_path
        )
        assert result.returncode == code, result.stderr


@pytest.mark.parametrize("args", [("ui",), ("run", DEMO), ("run", "--manifest", "w.yaml")])
def test_a_home_that_is_not_writable_is_named(tmp_path: Path, args: tuple[str, ...]):
    write_manifest(tmp_path / "w.yaml", make_shell_workflow(("a", "exit 0")))
    (tmp_path / "home").write_text("")
    result = run_rekindle(
        *args, cwd=tmp_path, REKINDLE_HOME="home", S3_ENDPOINT_URL="", MLFLOW_TRACKING_URI=""
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert str(tmp_path / "home") in result.stderr
    assert "Traceback" not in result.stderr


def test_config_shows_each_value_and_its_origin(tmp_path: Path):
    result = run_rekindle(
        "config", DEMO, "--set", "serve.port=9999", cwd=tmp_path, REKINDLE_TRAIN__SEED="5"
    )
    origins = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "9999" in origins["serve.port"]
    assert "--set serve.port=9999" in origins["serve.port"]
    assert origins["train.seed"].split()[1:] == ["5", "REKINDLE_TRAIN__SEED"]
    assert origins["data.source"].endswith("demo.yaml")
    assert any(line.endswith("default") for line in origins.values())


def test_explain_knows_the_keys_of_a_workload_only_with_its_config(tmp_path: Path):
    explained = run_rekindle("config", "--explain", "train.schedule", cwd=tmp_path).stdout
    assert explained.startswith('train.schedule: linear | cosine | constant  (default: "linear")\n')

    keys = [
        setting["key"]
        for setting in json.loads(
            run_rekindle("config", "--explain", "train", "-o", "json", cwd=tmp_path).stdout
        )
    ]

    assert keys == [f"train.{name}" for name in TrainConfig.model_fields]
    assert (
        "data.columns.card: text"
        in run_rekindle("config", DEMO, "--explain", "data", cwd=tmp_path).stdout
    )
    wrong = run_rekindle("config", DEMO, "--explain", "train.shedule", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr == 'error: train.shedule is not a known key. Did you mean "schedule"?\n'


@pytest.mark.parametrize("name", ["HOME", "PATH"])
def test_a_mistyped_environment_variable_is_refused(tmp_path: Path, name: str):
    result = run_rekindle(
        "status", cwd=tmp_path, **{f"REKINDLE_{name}S": "elsewhere", "REKINDLE_NAME": "shop"}
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert (
        result.stderr == f"error: REKINDLE_{name}S is not a variable of Rekindle. Did you mean"
        f' "REKINDLE_{name}"?\n'
    )


def test_json_output_is_one_object_on_stdout(tmp_path: Path):
    file = write_manifest(
        tmp_path / "four.yaml",
        make_shell_workflow(*[(name, "exit 0") for name in ("a", "b", "c", "d")]),
    )
    result = run_rekindle("run", "--manifest", file, "-o", "json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)

    keys = {
        "workflow",
        "phase",
        "manifest_sha256",
        "model_sha256",
        "verdict",
        "metrics",
        "endpoint",
        "run_id",
    }

    assert keys <= set(output)

    assert output["workflow"] == "four"
    assert output["phase"] == "Succeeded"
    assert output["status"]["phase"] == "Succeeded"

    assert [(step["name"], step["phase"]) for step in output["steps"]] == [
        (name, "Succeeded") for name in "abcd"
    ]
    assert re.fullmatch("[0-9a-f]{64}", output["manifest_sha256"])
    assert "a succeeded" in result.stderr
    status = json.loads(run_rekindle("status", "four", "-o", "json", cwd=tmp_path).stdout)
    assert status.pop("processes") == []
    assert status == {key: value for key, value in output.items() if key != "status"}


def test_a_failure_is_short_and_ends_with_the_resume_command(tmp_path: Path):
    failing_workflow = make_shell_workflow(
        ("good", "echo x >> good.txt"),
        ("bad", "echo 'error: no such column' >&2; test -e /tmp/mended"),
    )
    file = write_manifest(tmp_path / "w.yaml", failing_workflow)
    result = run_rekindle("run", "--manifest", file, cwd=tmp_path)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) <= 15
    assert "no such column" in result.stderr
    assert "step    bad" in lines
    (log,) = [line.split()[1] for line in lines if line.startswith("log ")]
    assert "no such column" in (tmp_path / log).read_text()
    assert lines[-1] == "resume  rekindle resume four"


@pytest.mark.parametrize("is_configured", [False, True])
def test_an_image_with_another_python_is_a_warning_with_both_versions(
    tmp_path: Path, is_configured: bool
):
    other = f"3.{sys.version_info.minor + 1}"
    current = f"3.{sys.version_info.minor}"
    manifest = make_shell_workflow(("a", "true"), ("b", "true"))
    manifest["spec"]["templates"][1]["script"]["image"] = image = (
        f"registry.example/python:{other}-slim"
    )
    manifest["spec"]["templates"][2]["script"]["image"] = f"python:{current}"

    if is_configured:
        (tmp_path / ".rekindle").mkdir()
        write_manifest(tmp_path / ".rekindle/images.yaml", {image: {"python": sys.executable}})
        assert run_rekindle("trust", ".rekindle", cwd=tmp_path).returncode == 0

    result = run_rekindle(
        "run", "--manifest", write_manifest(tmp_path / "w.yaml", manifest), cwd=tmp_path
    )
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert result.returncode == 0
    assert len(warnings) == (0 if is_configured else 1)

    if not is_configured:
        assert f"{image} runs here on Python {current}, not {other}" in warnings[0]
        assert "images.yaml" in warnings[0]


def test_a_folder_can_hold_the_workflow_and_its_templates(tmp_path: Path):
    template = make_shell_workflow(("shared", "echo from a List")) | {
        "kind": "WorkflowTemplate",
        "metadata": {"name": "base"},
    }
    folder = tmp_path / "flows"
    folder.mkdir()
    write_manifest(folder / "a.yml", {"apiVersion": "v1", "kind": "List", "items": [template]})
    run = make_shell_workflow() | {"spec": {"workflowTemplateRef": {"name": "base"}}}
    (folder / "b.json").write_text(json.dumps(run))
    (folder / "README.md").write_text("no: manifest")
    result = run_rekindle("run", "--manifest", "flows", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert run_rekindle("logs", cwd=tmp_path).stdout.endswith("| from a List\n")


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        ("release", 0, "released"),
        ("keep", 3, "not released"),
        ("same", 0, "already serving"),
    ],
)
def test_the_exit_code_shows_the_verdict_of_the_gate(
    tmp_path: Path, verdict: str, code: int, words: str
):
    result = run_rekindle(
        "run",
        "--manifest",
        write_manifest(tmp_path / "w.yaml", gated_workflow(verdict)),
        cwd=tmp_path,
    )
    assert result.returncode == code
    assert words in result.stdout


def test_outputs_of_workflows_without_the_label_of_rekindle_are_not_verdicts(tmp_path: Path):
    manifest = gated_workflow("keep")
    del manifest["metadata"]["labels"]
    result = run_rekindle(
        "run", "--manifest", write_manifest(tmp_path / "w.yaml", manifest), cwd=tmp_path
    )
    assert result.returncode == 0
    assert "verdict" not in result.stdout


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("second_verdict", "code"), [("keep", 3), ("release", 3), ("same", 0)])
def test_both_verdicts_of_two_evaluations_are_shown_and_set_the_exit_code(
    tmp_path: Path, second_verdict: str, code: int
):
    judge = "printf {} > /tmp/v; echo '{{\"auc\": 0.{}}}' > /tmp/m; printf 'as bad as {}' > /tmp/r"
    scripts = [
        ("judge-a", judge.format("keep", 5, "chance")),
        ("judge-b", judge.format(second_verdict, 6, "before")),
    ]
    manifest = make_shell_workflow(*scripts)

    manifest["metadata"]["labels"] = {"app.kubernetes.io/part-of": "rekindle"}
    for template in manifest["spec"]["templates"][1:]:
        names = {"verdict": "v", "metrics": "m", "reason": "r"}
        files = [
            {"name": name, "valueFrom": {"path": f"/tmp/{file}"}} for name, file in names.items()
        ]
        template["outputs"] = {"parameters": files}

    file = write_manifest(tmp_path / "w.yaml", manifest)
    result = run_rekindle("run", "--manifest", file, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert "judged    judge-a: keep. as bad as chance\n" in result.stdout
    assert f"judged    judge-b: {second_verdict}. as bad as before\n" in result.stdout
    verdicts = json.loads(run_rekindle("status", "four", "-o", "json", cwd=tmp_path).stdout)[
        "verdicts"
    ]
    assert [(each["task"], each["verdict"], each["metrics"]) for each in verdicts] == [
        ("judge-a", "keep", {"auc": 0.5}),
        ("judge-b", second_verdict, {"auc": 0.6}),
    ]


@pytest.mark.parametrize(("label", "code"), [("rekindle", 2), ("other", 1)])
def test_only_steps_of_rekindle_can_report_an_invalid_config(tmp_path: Path, label: str, code: int):
    manifest = make_shell_workflow(("only", "exit 78"))
    manifest["metadata"]["labels"] = {"app.kubernetes.io/part-of": label}
    result = run_rekindle(
        "run", "--manifest", write_manifest(tmp_path / "w.yaml", manifest), cwd=tmp_path
    )
    assert result.returncode == code


def test_status_and_logs_show_the_steps(tmp_path: Path):
    file = write_manifest(
        tmp_path / "w.yaml",
        make_shell_workflow(("first", "echo one"), ("second", "echo two; exit 1")),
    )
    assert "no runs in" in run_rekindle("status", cwd=tmp_path).stdout
    assert run_rekindle("run", "--manifest", file, cwd=tmp_path).returncode == 1

    (row,) = [
        line
        for line in run_rekindle("status", cwd=tmp_path).stdout.splitlines()
        if line.startswith("four")
    ]

    assert row.split()[1] == "Failed"
    assert (
        json.loads(run_rekindle("status", "-o", "json", cwd=tmp_path).stdout)["runs"][0]["run"]
        == "four"
    )
    steps = json.loads(run_rekindle("status", "four", "-o", "json", cwd=tmp_path).stdout)["steps"]
    assert [(step["name"], step["phase"]) for step in steps] == [
        ("first", "Succeeded"),
        ("second", "Failed"),
    ]
    assert run_rekindle("logs", cwd=tmp_path).stdout.count("|") == 2
    assert run_rekindle("logs", "four", "second", cwd=tmp_path).stdout.endswith("| two\n")
    unknown = run_rekindle("logs", "four", "secnd", cwd=tmp_path)
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    expected = (
        'error: the step "secnd" does not exist in four. Did you mean "second"? Steps: first,'
        " second.\n"
    )
    assert unknown.stderr == expected
    longer = run_rekindle("logs", "four", "seconds", cwd=tmp_path)
    assert longer.returncode == 2
    assert 'Did you mean "second"?' in longer.stderr
    records = [
        json.loads(line)
        for line in run_rekindle("logs", "-o", "json", cwd=tmp_path).stdout.splitlines()
    ]
    assert ["first" in line["step"] for line in records] == [True, False]
    assert [line["line"] for line in records] == ["one", "two"]
    assert json.loads(run_rekindle("down", "-o", "json", cwd=tmp_path).stdout) == {"stopped": []}
    unknown = run_rekindle("status", "fuor", cwd=tmp_path)
    assert unknown.returncode == 2
    assert 'Did you mean "four"?' in unknown.stderr


@pytest.mark.slow
def test_a_manifest_from_a_pipe_runs(tmp_path: Path):
    manifest = json.dumps(make_shell_workflow(("a", "echo it ran")))
    environ = {**os.environ, "REKINDLE": REKINDLE, "MANIFEST": manifest}

    for name, line in {
        "stdin": 'echo "$MANIFEST" | "$REKINDLE" run --manifest /dev/stdin',
        "pipe": '"$REKINDLE" run --manifest <(echo "$MANIFEST")',
        "fifo": 'mkfifo f; echo "$MANIFEST" > f & "$REKINDLE" run --manifest f',
    }.items():
        folder = tmp_path / name
        folder.mkdir()

        result = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=20,
        )

        assert result.returncode == 0, result.stderr
        assert "a succeeded" in result.stdout, result.stderr


@pytest.mark.slow
def test_runs_of_a_schedule_in_the_same_second_all_succeed(tmp_path: Path):
    cron = make_shell_workflow(("a", "true")) | {"kind": "CronWorkflow"}
    cron["spec"] = {"schedules": ["@daily"], "workflowSpec": cron["spec"]}
    file = write_manifest(tmp_path / "w.yaml", cron)
    runs = [
        subprocess.Popen(
            [REKINDLE, "run", "--manifest", file], cwd=tmp_path, stdout=subprocess.DEVNULL
        )
        for _ in range(3)
    ]
    assert [run.wait(20) for run in runs] == [0, 0, 0]
    names = [path.name for path in (tmp_path / ".rekindle/runs").iterdir()]
    assert len(names) == 3
    assert all(re.fullmatch(r"four-\d{10}", name) for name in names)


def test_a_deleted_working_directory_is_an_error_message(tmp_path: Path):
    line = 'rmdir "$PWD"; exec "$REKINDLE" status'
    result = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "REKINDLE": REKINDLE},
        capture_output=True,
        text=True,
        timeout=20,
    )

    assert result.returncode == 2
    assert "current directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_refused_commands_also_print_json(tmp_path: Path):
    refused = run_rekindle("run", str(tmp_path / "none.yaml"), "-o", "json", cwd=tmp_path)
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["phase"] == "Failed"


def test_stop_from_another_terminal_ends_the_run_and_resume_continues_it(
    tmp_path: Path, shared_folder: Path
):
    mark_file = shared_folder / "again"
    waits_once = f"test -e {mark_file} && exec echo begun; touch {mark_file}; echo begun; sleep 100"
    file = write_manifest(tmp_path / "w.yaml", make_shell_workflow(("long", waits_once)))

    process = subprocess.Popen(
        [REKINDLE, "run", "--manifest", file],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    wait_until_started(process, tmp_path)
    followed = subprocess.Popen(
        [REKINDLE, "logs", "-f"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert run_rekindle("stop", cwd=tmp_path).stdout == "stopped four\n"
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "resume  rekindle resume four"
    assert "| begun" in followed.communicate(timeout=20)[0]
    assert run_rekindle("resume", cwd=tmp_path).returncode == 0


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that pods share with this machine; it is not in /tmp, because each pod has its own
    /tmp."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_run_quickly_and_leaves_no_process(
    tmp_path: Path, signal_number: int, code: int
):
    file = write_manifest(
        tmp_path / "w.yaml", make_shell_workflow(("long", "echo begun; sleep 100; exit 0"))
    )
    process = subprocess.Popen(
        [REKINDLE, "run", "--manifest", file],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    pods = wait_until_started(process, tmp_path)
    assert pods
    process.send_signal(signal_number)
    # shorter than the grace period of a pod, which is 30 s
    output, _ = process.communicate(timeout=25)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert output.splitlines()[-1].endswith("rekindle resume four")
    assert psutil.wait_procs(pods, timeout=25)[1] == []


def test_ctrl_c_on_a_terminal_asks_before_it_ends_the_run(tmp_path: Path):
    file = write_manifest(
        tmp_path / "w.yaml", make_shell_workflow(("long", "echo begun; sleep 100; exit 0"))
    )
    terminal, child = pty.openpty()

    process = subprocess.Popen(
        [REKINDLE, "run", "--manifest", file],
        cwd=tmp_path,
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )

    os.close(child)
    wait_until_started(process, tmp_path)
    process.send_signal(signal.SIGINT)
    shown = b""
    os.set_blocking(terminal, False)

    def is_question_shown() -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(terminal, 65536)
        return b"Stop this run? y" in shown

    until("the question", is_question_shown, evidence=lambda: shown)
    assert process.poll() is None
    os.set_blocking(terminal, True)
    os.write(terminal, b"y\n")
    # shorter than the grace period of a pod, which is 30 s
    assert process.wait(timeout=25) == 130

    try:
        while chunk := os.read(terminal, 65536):
            shown += chunk
    except OSError:  # the other end of the terminal is closed, so the whole output was read
        pass

    assert b"rekindle resume four" in shown

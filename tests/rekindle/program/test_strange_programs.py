"""Tests of programs with unusual behaviour: the run ends with its result, or with an error of one
sentence."""

import re
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import exit_codes
from rekindle.program.checkpoints.store import ProgramStore
from rekindle.storage import Store
from tests.rekindle.program.pods import Pods, StartPods
from tests.waiting import until

# the function `save` writes checkpoints under another name; the function `finish` writes the result
START = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def save(step):
    (folder / "draft.tmp").write_text('{}')
    os.replace(folder / "draft.tmp", folder / f"step_{step}.json")

def finish():
    (folder / "final.json").write_text('{"slope": 2.0}')

"""
HARMLESS_PROGRAMS = {
    "binary output": """
os.write(1, bytes(range(256)) * 1000 + b"\\x1b]0;title\\x07\\r")
finish()
""",
    "daemons": """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        while True:
            os.write(1, b"the daemon writes\\n")
            time.sleep(0.01)
    os._exit(0)
finish()
""",
    "fast output": """
line = b"x" * 99 + b"\\n"
for _ in range(300):
    os.write(1, line * 10000)
finish()
""",
    "another folder": """
os.chdir("/")
save(1)
finish()
""",
    "a deleted folder": """
import shutil
save(1)
time.sleep(1.5)
shutil.rmtree(folder)
time.sleep(1.5)
folder.mkdir()
finish()
""",
    "special files": """
os.mkfifo(folder / "step_1.pt")
(folder / "step_2").mkdir()
os.mkfifo(folder / "step_2/model.pt")
os.symlink("/dev/zero", folder / "step_3.pt")
os.symlink("..", folder / "step_4")
os.symlink("loop", folder / "loop")
socket.socket(socket.AF_UNIX).bind(str(os.path.relpath(folder / "step_5.pt")))
save(6)
time.sleep(3)
finish()
""",
    "names": """
names = (b"step_1\\n.ckpt", b"step_2\\xff.ckpt", b"step_3\\x1b[2J.ckpt", b"-rf.ckpt", b"step_4")
for name in names:
    path = os.path.join(os.fsencode(folder), name)
    if name == b"step_4":
        os.mkdir(path)
        path += b"/model\\n.json"
    Path(os.fsdecode(path)).write_text("weights")
    time.sleep(0.2)
time.sleep(3)
(folder / "step_5.ckpt").write_text("weights")
time.sleep(3)
finish()
""",
}


def run(start_pods: StartPods, path: Path, body: str, **program: Any) -> Pods:
    path.write_text(START + body)
    section = {"preload": [], "result": "{checkpoints}/final.json", **program}
    pods = start_pods([str(path), "{checkpoints}"], program=section, hung_seconds=20)
    pods.start(1)
    return pods


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", HARMLESS_PROGRAMS)
def test_a_strange_program_ends_with_its_result(
    name: str, start_pods: StartPods, tmp_path: Path, s3: Store
) -> None:
    pods = run(start_pods, tmp_path / "train.py", HARMLESS_PROGRAMS[name])
    assert [pod.wait() for pod in pods.pods] == [0, 0], pods.logs()[-3000:]
    assert s3.head(f"{pods.prefix}/model/result/final.json")
    assert "Exception" not in pods.logs().replace("\0", ""), pods.logs()[-3000:]


@pytest.mark.slow
def test_strange_names_do_not_stop_the_uploads(
    start_pods: StartPods, tmp_path: Path, s3: Store
) -> None:
    body = HARMLESS_PROGRAMS["names"].replace("finish()", "time.sleep(3600)")
    pods = run(start_pods, tmp_path / "train.py", body)
    store = ProgramStore(s3, f"{pods.prefix}/checkpoints")

    def has_last_checkpoint() -> bool:
        keys = store.list_checkpoint_keys()
        return bool(keys) and store.read_record(keys[-1]).path == "step_5.ckpt"

    until("the last checkpoint", has_last_checkpoint, evidence=pods.logs)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("input()", r"exit code 1: \S*train\.py:\d+: EOFError: EOF when reading a line$"),
        (
            "import shutil; shutil.rmtree(folder); raise ValueError('no data')",
            r"exit code 1: \S*train\.py:\d+: ValueError: no data$",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"was ended by SIGSEGV$"),
        ("os._exit(3)", r"ended with exit code 3$"),
    ],
    ids=["stdin", "deleted", "signal", "code"],
)
@pytest.mark.slow
def test_a_strange_end_has_one_sentence(
    body: str, message: str, start_pods: StartPods, tmp_path: Path
) -> None:
    pods = run(start_pods, tmp_path / "train.py", body)
    assert [pod.wait() for pod in pods.pods] == [1, 1], pods.logs()
    assert re.search(message, pods.pods[0].output.rstrip()), pods.logs()


@pytest.mark.slow
def test_a_shell_script_that_reads_stdin_does_not_wait(
    start_pods: StartPods, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\ncat\nexit 3\n")
    script.chmod(0o755)
    pods = start_pods([str(script), "{checkpoints}"], program={"preload": []}, hung_seconds=20)
    pods.start(1)
    assert [pod.wait() for pod in pods.pods] == [1, 1], pods.logs()
    assert "exit code 3" in pods.pods[0].output


@pytest.mark.slow
def test_a_result_that_is_not_a_file_is_named(start_pods: StartPods, tmp_path: Path) -> None:
    pods = run(start_pods, tmp_path / "train.py", "os.mkfifo(folder / 'final.json')")
    codes = [pod.wait() for pod in pods.pods]
    assert codes == [exit_codes.CODE_ERROR] * 2, pods.logs()
    assert "final.json" in pods.pods[0].output.splitlines()[-1], pods.logs()

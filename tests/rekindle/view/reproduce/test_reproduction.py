"""A release is trained again in a clone of its repository: with equal bits, or with the first difference."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.project import create
from tests.commands import Shell, shell
from tests.waiting import until

IDENTITY = "git -c user.name=a -c user.email=a@b"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell in a clone of a project that has released the model `shop`; the original project is gone."""
    base = tmp_path_factory.mktemp("reproduce")
    folder = base / "shop"
    create(folder)
    config = yaml.safe_load((folder / "configs/shop.yaml").read_text())
    config["train"] |= {"epochs": 10, "validation": 0.1}
    (folder / "configs/shop.yaml").write_text(yaml.safe_dump(config))
    (base / "tmp").mkdir()
    with shell(folder, REKINDLE_HOME=str(base / "home"), TMPDIR=str(base / "tmp")) as typed:
        assert typed(f"git init -q && git add -A && {IDENTITY} commit -qm first").returncode == 0
        released = typed("rekindle run configs/shop.yaml --set gate.maximum.rmse=1000 -o json")
        assert json.loads(released.stdout)["verdict"] == "release", released.stderr
        subprocess.run(["git", "clone", "-q", str(folder), str(base / "clone")], check=True)
        shutil.rmtree(folder)
        typed.folder = base / "clone"
        yield typed


def reproduce(clone: Shell, options: str = "") -> tuple[int, dict[str, Any], str]:
    done = clone(f"rekindle reproduce shop {options} -o json")
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def leftovers(clone: Shell) -> list[Path]:
    return list(Path(clone.environ["TMPDIR"]).glob("rekindle-reproduce-*"))


def registered(clone: Shell) -> list[str]:
    """Return the files of the home's releases and records, which a reproduction must not change."""
    home = Path(clone.environ["REKINDLE_HOME"])
    folders = [home / name for name in ("runs", "objects", "s3/buckets", "deployments")]
    return sorted(str(path) for folder in folders for path in folder.glob("*/*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_clones_train_the_same_bits_at_once(clone: Shell) -> None:
    before = registered(clone)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: reproduce(clone), range(2)))
    for code, result, errors in results:
        assert (code, result["equal"], result["findings"]) == (0, True, []), errors
        assert result["model_sha256"] == result["release_sha256"]
    assert registered(clone) == before and not clone("git status --short").stdout
    until("the removal of the folder", lambda: not leftovers(clone))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_changed_data_and_code_are_reported_first_and_explained_if_trained_anyway(clone: Shell, tmp_path: Path) -> None:
    data = (clone.folder / "data/power.csv").read_text()
    (tmp_path / "power.csv").write_text(f"{data[:-2]}{(int(data[-2]) + 1) % 10}\n")
    code, result, errors = reproduce(clone, f"--data {tmp_path / 'power.csv'}")
    assert code == 2 and [(each["subject"], each["fatal"]) for each in result["findings"]] == [("data", True)], errors
    assert result["equal"] is None and "add --anyway" in errors

    step = clone.folder / "steps/shop.py"
    text = step.read_text()
    step.write_text(text.replace("square()", "abs()"))
    clone(f"{IDENTITY} commit -qam second")
    try:
        code, result, errors = reproduce(clone, "--commit HEAD --check")
        assert code == 2 and ("code", True) in [(each["subject"], each["fatal"]) for each in result["findings"]]
        assert "steps.shop" in errors
        code, result, errors = reproduce(clone, "--commit HEAD --anyway")
        assert code == 3 and "the first recorded step with another loss is step 1:" in result["difference"], errors
    finally:
        clone("git reset -q --hard HEAD^")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_reproduction_leaves_nothing_and_can_be_repeated(clone: Shell) -> None:
    before = registered(clone)
    process = subprocess.Popen(
        ["rekindle", "reproduce", "shop"], cwd=clone.folder, env=dict(clone.environ), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    next(line for line in process.stderr if "train running" in line)
    homes = [str(folder) for folder in leftovers(clone)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    until("the removal of the folder", lambda: not leftovers(clone))
    until("the end of the processes", lambda: not any(map(running, homes)))
    assert registered(clone) == before and not clone("git status --short").stdout
    assert clone("git worktree prune -n -v && git worktree list").stdout.count("\n") == 1
    assert reproduce(clone)[0] == 0


def running(home: str) -> bool:
    return subprocess.run(["pgrep", "-f", home], capture_output=True).returncode == 0

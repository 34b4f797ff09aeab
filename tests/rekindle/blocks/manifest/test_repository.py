"""Git starts no program that a repository names, and every kind of clone is still read."""

import hashlib
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.blocks.manifest.provenance import read_git_sha
from rekindle.errors import ConfigError
from rekindle.operations.reproduce.checkout import check_out, find_commit
from tests.rekindle.cli.stranger import Folder, run_git


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """An untrusted repository, which is the working directory, with programs in every place in
    which git accepts the name of a program."""
    folder = Folder(tmp_path)
    (folder.root / "pyproject.toml").write_text("[tool.rekindle]\n")
    folder.plant_repository()
    monkeypatch.chdir(folder.root)
    yield folder
    folder.close()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own repository with two commits, which is the working directory."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run_git(folder, "init", "-q", "-b", "main")
    for text in ("one", "two"):
        (folder / "file").write_text(f"{text}\n")
        run_git(folder, "add", "-A")
        run_git(folder, "commit", "-qm", text)
    return folder


def read_head(folder: Path) -> str:
    return run_git(folder, "rev-parse", "HEAD").strip()


def change_stat(file: Path) -> None:
    """Let git compare the content of a file, because the times of the file differ from the times in
    the index."""
    os.utime(file, (1, 1))


def test_reading_and_checking_out_an_untrusted_repository_runs_no_program(
    stranger: Folder, tmp_path: Path
):
    commit = find_commit("HEAD")
    assert read_git_sha() == f"{commit}-dirty"
    assert (
        check_out(commit, tmp_path / "out") / "pyproject.toml"
    ).read_text() == "[tool.rekindle]\n"
    assert find_commit("0" * 40) == ""
    assert stranger.executed() == set()
    assert stranger.listener.connections == 0


def test_the_programs_of_the_untrusted_repository_would_run(stranger: Folder):
    """The untrusted repository really names programs, because plain git runs them."""
    for command in ("status", "diff"):
        subprocess.run(["git", command], cwd=stranger.root, capture_output=True)
    assert {"git include", "git filter.evil.process"} <= stranger.executed()


def test_missing_objects_of_an_untrusted_partial_clone_are_not_fetched(
    stranger: Folder, tmp_path: Path
):
    commit = find_commit("HEAD")
    blob = run_git(stranger.root, "rev-parse", "HEAD:pyproject.toml").strip()
    (stranger.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(ConfigError, match="git fetch --refetch --no-filter"):
        check_out(commit, tmp_path / "out")
    assert stranger.executed() == set()


@pytest.mark.parametrize(
    "name", ["HEAD", "config", "index", "packed-refs", "shallow", "commondir", "info/attributes"]
)
def test_a_fifo_or_a_device_in_the_repository_does_not_block(repository: Path, name: str):
    file = repository / ".git" / name
    for make in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        make()
        assert read_git_sha() in ("", head_of_main(repository), f"{head_of_main(repository)}-dirty")


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "name",
    [
        "refs/heads/main",
        "objects/pack/multi-pack-index",
        "objects/info/commit-graph",
        "objects/info/commit-graphs/commit-graph-chain",
        "reftable/tables.list",
        "../.gitattributes",
        "../folder/.gitattributes",
        "../inner/.git/HEAD",
        "../inner/.git/commondir",
        "../inner/.git/refs/heads/main",
        "../inner/.git/config",
    ],
)
def test_a_repository_that_git_would_wait_for_is_not_read(
    repository: Path, capsys: pytest.CaptureFixture[str], name: str
):
    (repository / "folder").mkdir()
    (repository / "folder/file").write_text("")
    run_git(repository, "init", "-q", "-b", "main", "inner")
    run_git(repository / "inner", "commit", "-q", "--allow-empty", "-m", "one")
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-qm", "three")
    assert read_git_sha() == read_head(repository)

    file = repository / ".git" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    assert read_git_sha() == ""
    assert "regular file" in capsys.readouterr().err or name.endswith("HEAD")


def test_a_reference_without_an_end_is_not_read(repository: Path):
    (repository / ".git/refs/heads/main").unlink()
    (repository / ".git/refs/heads/main").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="refs/heads/main is a link"):
        find_commit("HEAD")


def test_an_object_of_many_gigabytes_is_not_unpacked(
    repository: Path, capsys: pytest.CaptureFixture[str]
):
    name = "ab" * 20
    folder = repository / ".git/objects/ab"
    # the object may already be in the repository by chance
    folder.mkdir(exist_ok=True)
    (folder / name[2:]).write_bytes(zlib.compress(b"commit %d\0" % (3 << 30)))
    (repository / ".git/refs/heads/main").write_text(f"{name}\n")
    assert read_git_sha() == ""
    assert "Out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_change_of_a_file_that_git_is_told_not_to_look_at_is_noticed(repository: Path, flag: str):
    run_git(repository, "update-index", flag, "file")
    assert read_git_sha() == read_head(repository)
    (repository / "file").write_text("three\n")
    assert read_git_sha() == f"{read_head(repository)}-dirty"


def test_settings_of_the_repository_do_not_hide_a_change(repository: Path):
    for name, value in {"core.trustctime": "false", "core.checkstat": "minimal"}.items():
        run_git(repository, "config", name, value)
    file = repository / "file"
    change_stat(file)
    run_git(repository, "update-index", "--refresh")

    # the new file is another inode, but has the size and the time of the old file
    (repository / "new").write_text("TWO\n")
    (repository / "new").rename(file)
    change_stat(file)
    assert read_git_sha() == f"{read_head(repository)}-dirty"


def test_a_staged_submodule_is_a_change(repository: Path):
    run_git(repository, "init", "-q", "-b", "main", "inner")
    run_git(repository / "inner", "commit", "-q", "--allow-empty", "-m", "one")
    run_git(repository, "add", "inner")
    assert read_git_sha() == f"{read_head(repository)}-dirty"


def head_of_main(folder: Path) -> str:
    return (folder / ".git/refs/heads/main").read_text().strip()


def test_variables_of_the_environment_do_not_change_the_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = read_head(repository)
    for name in (
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_EXTERNAL_DIFF",
    ):
        monkeypatch.setenv(name, str(tmp_path / "other"))
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.fsmonitor=touch canary'")
    assert read_git_sha() == expected
    assert not (repository / "canary").exists()


@pytest.mark.slow
def test_clones_of_every_kind_are_read(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = read_head(repository)
    run_git(repository, "worktree", "add", "-q", "--detach", str(tmp_path / "worktree"), "HEAD~1")
    run_git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", "shallow")

    run_git(
        tmp_path,
        "clone",
        "-q",
        "--separate-git-dir",
        str(tmp_path / "elsewhere"),
        str(repository),
        "separate",
    )

    run_git(tmp_path, "clone", "-q", str(repository), "packed")
    run_git(tmp_path / "packed", "pack-refs", "--all")
    run_git(tmp_path, "clone", "-q", str(repository), "split")
    run_git(tmp_path / "split", "update-index", "--split-index")
    run_git(tmp_path, "clone", "-q", str(repository), "sparse")
    run_git(tmp_path / "sparse", "sparse-checkout", "set", "--sparse-index", "folder")
    run_git(tmp_path, "init", "-q", "outer")

    run_git(
        tmp_path / "outer",
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        str(repository),
        "inner",
    )

    run_git(tmp_path / "outer", "commit", "-qm", "outer")

    clones = (
        "shallow",
        "separate",
        "packed",
        "split",
        "sparse",
        "outer/inner",
        "outer",
        "worktree",
    )
    for name in clones:
        folder = tmp_path / name
        monkeypatch.chdir(folder)
        assert read_git_sha() == read_head(folder), name
        assert find_commit("HEAD") == read_head(folder), name

        if name != "outer":
            out = check_out(read_head(folder), tmp_path / f"out-{name.replace('/', '-')}")
            assert (out / "file").read_text() == ("one\n" if name == "worktree" else "two\n")
            change_stat(folder / "file")
            assert read_git_sha() == read_head(folder), name
            (folder / "file").write_text("three\n")
            assert read_git_sha() == f"{read_head(folder)}-dirty", name

    assert read_head(tmp_path / "shallow") == expected
    monkeypatch.chdir(tmp_path / "outer")
    run_git(tmp_path / "outer/inner", "checkout", "-q", "-f", "HEAD~1")
    assert read_git_sha() == f"{read_head(tmp_path / 'outer')}-dirty"


def test_objects_of_another_repository_are_not_read(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_git(tmp_path, "clone", "-q", "--shared", str(repository), "shared")
    monkeypatch.chdir(tmp_path / "shared")
    assert read_git_sha() == ""
    assert "warning: the manifest does not name a commit" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match="objects/info/alternates names objects outside of the repository"
    ):
        find_commit("HEAD")

    run_git(tmp_path / "shared", "repack", "-q", "-a", "-d")
    (tmp_path / "shared/.git/objects/info/alternates").unlink()
    assert read_git_sha() == find_commit("HEAD") == read_head(repository)


def test_a_link_in_a_commit_does_not_lead_to_a_file_that_is_written(
    repository: Path, tmp_path: Path
):
    content = b"weights" * 1000
    oid = hashlib.sha256(content).hexdigest()
    stored = repository / ".git/lfs/objects" / oid[:2] / oid[2:4] / oid
    stored.parent.mkdir(parents=True)
    stored.write_bytes(content)
    outside = tmp_path / "outside"
    outside.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n"
    )
    pointer = outside.read_text()
    (repository / "a.bin").symlink_to(outside)
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-qm", "link")
    check_out(read_head(repository), tmp_path / "out")
    assert outside.read_text() == pointer


def test_a_repository_without_a_commit_has_no_sha(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert read_git_sha() == ""
    run_git(tmp_path, "init", "-q")
    assert read_git_sha() == ""
    assert find_commit("HEAD") == ""


def test_a_repository_of_sha256_objects_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_git(tmp_path, "init", "-q", "--object-format=sha256")
    run_git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    assert read_git_sha() == find_commit("HEAD") == read_head(tmp_path)
    assert len(read_git_sha()) == 64


@pytest.mark.parametrize("setting_place", ["--local", "--global"])
def test_line_ends_follow_the_settings_of_the_user_and_the_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting_place: str
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    run_git(repository, "config", setting_place, "core.autocrlf", "true")
    (repository / "file").unlink()
    run_git(repository, "checkout", "file")
    change_stat(repository / "file")
    assert (repository / "file").read_bytes() == b"two\r\n"
    assert read_git_sha() == read_head(repository)
    assert (check_out(read_head(repository), tmp_path / "out") / "file").read_bytes() == b"two\r\n"


def test_files_of_git_lfs_are_compared_and_checked_out_by_their_content(
    repository: Path, tmp_path: Path
):
    content = b"weights" * 1000
    oid = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n"
    (repository / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (repository / "a.bin").write_text(pointer)
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-qm", "pointer")
    stored = repository / ".git/lfs/objects" / oid[:2] / oid[2:4] / oid
    stored.parent.mkdir(parents=True)
    shutil.copyfile(repository / "a.bin", stored)  # damaged
    assert (check_out(read_head(repository), tmp_path / "damaged") / "a.bin").read_text() == pointer

    stored.write_bytes(content)
    (repository / "a.bin").write_bytes(content)
    assert read_git_sha() == read_head(repository)
    assert (check_out(read_head(repository), tmp_path / "out") / "a.bin").read_bytes() == content

    (repository / "a.bin").write_bytes(content[:-1] + b"S")
    assert read_git_sha() == f"{read_head(repository)}-dirty"


@pytest.mark.parametrize("part", ["", "pack", "pack/pack-1.pack", "aa"])
def test_objects_behind_a_link_are_not_read(repository: Path, tmp_path: Path, part: str):
    other = tmp_path / "other"
    shutil.copytree(repository, other)
    linked = repository / ".git/objects" / part
    if linked.is_dir():
        shutil.rmtree(linked)
    linked.symlink_to(other / ".git/objects" / part)
    with pytest.raises(
        ConfigError, match=rf"objects/?{part} is a link to files outside of the repository"
    ):
        find_commit("HEAD")

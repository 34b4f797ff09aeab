"""The tab `changes`: the differences from the last run of the pipeline, and the steps whose results
come from the cache."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from argolocal.common.json_text import to_json
from argolocal.common.wording import format_duration, truncate
from argolocal.page.sources import Run
from argolocal.view.summary import parse_timestamp
from rekindle import project, tracking
from rekindle.blocks.manifest.provenance import RESERVED_PARAMETERS
from rekindle.blocks.manifest.repository import GitError, open_repository
from rekindle.errors import RekindleError
from rekindle.names import CommitId
from rekindle.operations import results
from rekindle.page.tabs.charts import format_number
from rekindle.page.tabs.records import Records
from rekindle.page.tabs.siblings import Siblings

MAX_COMMITS = 20
MAX_VALUE_LENGTH = 200
MISSING = "–"
DIRTY = "-dirty"
# kind of change → its singular and plural in a sentence, in the order of the table
KINDS = {
    "code": ("commit", "commits"),
    "packages": ("lock file", "lock files"),
    "config": ("setting", "settings"),
    "image": ("image", "images"),
    "data": ("fact of the data", "facts of the data"),
    "parameter": ("parameter", "parameters"),
}
# step outputs that describe the data
DATA_OUTPUTS = ("source_digest", "digest", "rows")
DATA_NAMES = {"source_digest": "source", "digest": "dataset", "rows": "rows"}
# settings that are shown as kind `image` instead of `config`
IMAGE_SETTINGS = ("cluster.image",)


@dataclass(frozen=True)
class Change:
    """A difference between two runs. `kind`: kind of the difference, a key of KINDS or `result`."""

    kind: str
    name: str
    previous: str
    now: str


@dataclass(frozen=True)
class Commit:
    """A commit of the project between the two runs."""

    sha: str
    subject: str


@dataclass(frozen=True)
class CachedStep:
    """A step whose outputs come from an earlier run."""

    step: str
    run: str
    earlier_step: str


@dataclass(frozen=True)
class Changes:
    """The differences between a run and an `earlier` run of its pipeline ("" without an earlier
    run).

    `others`: names of the runs that can be chosen for the comparison. `problem`: why the cached
    steps are unknown.
    """

    words: str
    earlier: str
    earlier_started: str | None
    changes: list[Change]
    results: list[Change]
    commits: list[Commit]
    cached: list[CachedStep]
    others: list[str]
    problem: str = ""


class ChangesTab:
    """The tab `changes`."""

    name = "changes"
    title = "Changes"
    content = Changes

    def __init__(self, records: Records, siblings: Siblings) -> None:
        self.records = records
        self.siblings = siblings

    def is_shown(self, run: Run) -> bool:
        return bool(self.records.facts(run).config)

    def build(self, run: Run, query: Mapping[str, str]) -> Changes:
        name = query.get("with", "")
        earlier = self.siblings.read(run, name) if name else self.siblings.previous(run)
        other_runs = self.siblings.names(run)

        try:
            sources = self.records.reused(run)
            problem = ""
        except RekindleError as error:
            sources = {}
            problem = f"The cached steps are not known: {error}"
        cached = [
            CachedStep(step, source.partition("/")[0], source.partition("/")[2])
            for step, source in sources.items()
        ]

        if earlier is None:
            words = (
                f"This is the first run of {self.records.facts(run).pipeline or 'its pipeline'}."
            )
            return Changes(words, "", None, [], [], [], cached, other_runs, problem)

        changes = list(self._compare_runs(earlier, run))
        return Changes(
            describe_changes(changes, earlier.name),
            earlier.name,
            earlier.created,
            changes,
            list(compare_results(earlier, run)),
            list_commits(
                *(self.records.facts(item).parameters.get("git_sha", "") for item in (earlier, run))
            ),
            cached,
            other_runs,
            problem,
        )

    def _compare_runs(self, earlier: Run, run: Run) -> Iterator[Change]:
        """Yield the differences in code, packages, config, image, data and parameters of two
        runs."""
        previous = self._collect_facts(earlier)
        now = self._collect_facts(run)
        for kind in KINDS:
            yield from compare_values(kind, previous[kind], now[kind])

    def _collect_facts(self, run: Run) -> dict[str, dict[str, str]]:
        """Return the facts that determine a run's result, such as its commit and settings, by kind
        and name."""
        facts = self.records.facts(run)
        parameters = facts.parameters
        settings = {
            name: value if isinstance(value, str) else to_json(value)
            for name, value in tracking.flatten(facts.config).items()
        }
        images = {name: settings.pop(name) for name in IMAGE_SETTINGS if name in settings}
        values = collect_outputs(run)
        return {
            "code": {"git commit": parameters.get("git_sha", "")},
            "packages": {"lock file": parameters.get("lock_hash", "")[:12]},
            "config": settings,
            "image": images,
            "data": {DATA_NAMES[name]: values[name] for name in DATA_OUTPUTS if name in values},
            "parameter": {
                name: value for name, value in parameters.items() if name not in RESERVED_PARAMETERS
            },
        }


def collect_outputs(run: Run) -> dict[str, str]:
    """Return the first value of each output of the steps of a run, by name."""
    output_values: dict[str, str] = {}
    for node in list((run.status.get("nodes") or {}).values()):
        for output_parameter in (node.get("outputs") or {}).get("parameters") or []:
            if output_parameter.get("value"):
                output_values.setdefault(output_parameter["name"], str(output_parameter["value"]))
    return output_values


def compare_values(
    change_kind: str, previous_values: Mapping[str, str], current_values: Mapping[str, str]
) -> Iterator[Change]:
    """Yield a change for each name whose values in the two runs differ."""
    for value_name in dict.fromkeys([*previous_values, *current_values]):
        old_value = previous_values.get(value_name, "")
        new_value = current_values.get(value_name, "")
        # facts of a step that has not run yet are unknown, not different
        is_unknown = change_kind == "data" and not (old_value and new_value)
        if old_value != new_value and not is_unknown:
            yield Change(
                change_kind, value_name, _format_value(old_value), _format_value(new_value)
            )


def _format_value(compared_value: str) -> str:
    if len(compared_value) >= 40 and all(
        c in "0123456789abcdef" for c in compared_value.removesuffix(DIRTY)
    ):
        has_changes = compared_value.endswith(DIRTY)
        return compared_value[:12] + (" with uncommitted changes" if has_changes else "")
    return truncate(compared_value, MAX_VALUE_LENGTH) or MISSING


def describe_changes(changes: list[Change], earlier: str) -> str:
    """Return a sentence with the number of changes of each kind, and a second sentence that names
    the kinds without a change."""
    count_by_kind = {kind: sum(change.kind == kind for change in changes) for kind in KINDS}
    different_parts = [
        f"{count} {KINDS[kind][count > 1]}" if kind not in ("code", "data") else f"the {kind}"
        for kind, count in count_by_kind.items()
        if count
    ]
    equal_kinds = [kind for kind in ("code", "config", "data") if not count_by_kind[kind]]
    if len(equal_kinds) > 1:
        equal_sentence = f" The {' and the '.join(equal_kinds)} are equal."
    else:
        equal_sentence = f" The {equal_kinds[0]} is equal." if equal_kinds else ""

    if not different_parts:
        return f"Nothing differs from {earlier}: neither code nor config nor data."
    return f"Since {earlier}, {' and '.join(different_parts)} changed.{equal_sentence}"


def compare_results(earlier: Run, run: Run) -> Iterator[Change]:
    """Yield a change for each result of two runs that differs: state, verdict, metrics and
    duration."""
    previous_results = _collect_results(earlier)
    current_results = _collect_results(run)
    for result_name in dict.fromkeys([*previous_results, *current_results]):
        if previous_results.get(result_name) != current_results.get(result_name):
            yield Change(
                "result",
                result_name,
                previous_results.get(result_name, MISSING),
                current_results.get(result_name, MISSING),
            )


def _collect_results(run: Run) -> dict[str, str]:
    output_values = results.read_parameters(run.status)
    run_results = {"state": run.phase.lower(), "verdict": output_values.get("verdict", "")}
    for row in results.list_verdicts(run.status):
        prefix = "" if len(results.list_verdicts(run.status)) == 1 else f"{row['task']} "
        run_results |= {
            f"{prefix}{name}": format_number(value)
            for name, value in row["metrics"].items()
            if value is not None
        }
    start = run.status.get("startedAt")
    end = run.status.get("finishedAt")
    if start and end:
        run_results["duration"] = format_duration(parse_timestamp(end) - parse_timestamp(start))
    return {name: value for name, value in run_results.items() if value}


def list_commits(previous_commit: str, current_commit: str) -> list[Commit]:
    """Return the commits between two runs, newest first, if the project is in a git repository that
    has both commits."""
    shas = [sha.removesuffix(DIRTY) for sha in (previous_commit, current_commit)]
    if shas[0] == shas[1] or not all(CommitId.matches(sha) for sha in shas):
        return []

    try:
        with open_repository(project.current_root()) as repository:
            if repository is None or not all(map(repository.find_commit, shas)):
                return []
            log_text = repository.git(
                "log",
                f"--max-count={MAX_COMMITS}",
                "--format=%h%x09%s",
                f"{shas[0]}..{shas[1]}",
            )
    except (GitError, RekindleError):
        return []

    lines = log_text.decode(errors="replace").splitlines()
    pairs = [line.partition("\t") for line in lines]
    return [Commit(sha, subject) for sha, _, subject in pairs]

"""Finds other runs of the same pipeline, for comparisons with a run."""

from argolocal.common.checked_names import RunName
from argolocal.page.sources import Run, RunSource
from rekindle.errors import ConfigError
from rekindle.page.tabs.records import Records

MAX_SIBLINGS = 20
# maximum number of runs to read in the search for siblings
MAX_READ = 200


class Siblings:
    """Finds the other runs of a run's pipeline, the siblings of the run."""

    def __init__(self, source: RunSource, records: Records) -> None:
        self.source = source
        self.records = records
        self._pipelines: dict[str, str] = {}

    def names(self, run: Run) -> list[str]:
        """Return the names of the other runs of the pipeline, newest first, at most
        MAX_SIBLINGS."""
        return self._list_siblings(run, [name for name in self.source.names() if name != run.name])

    def previous(self, run: Run) -> Run | None:
        """Return the last run of the pipeline that was started before `run`; None for the first
        run."""
        names = self.source.names()
        if run.name in names:
            names = names[names.index(run.name) + 1 :]
        for run_name in self._list_siblings(run, names, 1):
            return self.source.read(run_name)
        return None

    def read(self, run: Run, name: str) -> Run:
        """Read the run `name`. Raises ConfigError if `name` is not a run of the pipeline."""
        run_name = RunName.parse_or_none(name)
        if (
            run_name is None
            or run_name not in self.source.names()
            or self._read_pipeline_name(run_name) != self._read_pipeline_name(run.name)
        ):
            raise ConfigError(
                f"{name[:100]!r} is not a run of the pipeline of {run.name}: choose one of"
                f" {', '.join(self.names(run)) or 'its other runs, as soon as they exist'}."
            )
        return self.source.read(run_name)

    def _list_siblings(self, run: Run, names: list[str], count: int = MAX_SIBLINGS) -> list[str]:
        pipeline = self._read_pipeline_name(run.name)
        # the names of a pipeline's runs start with the name of the pipeline, so runs with other
        # names need not be read
        candidate_names = [name for name in names if name.startswith(f"{pipeline}-")]
        sibling_names: list[str] = []
        for name in candidate_names[:MAX_READ]:
            if self._read_pipeline_name(name) == pipeline:
                sibling_names.append(name)
            if len(sibling_names) == count:
                break
        return sibling_names

    def _read_pipeline_name(self, run_name: str) -> str:
        """Return the name of a run's pipeline; "" for a run that cannot be read."""
        if run_name not in self._pipelines:
            try:
                run = self.source.read(run_name)
            except ConfigError:
                return ""
            facts = self.records.facts(run)
            self._pipelines[run_name] = facts.pipeline or run_name.rpartition("-")[0]
        return self._pipelines[run_name]

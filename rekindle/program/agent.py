"""The first process of a pod that runs a training program: starts the program's processes, watches
their checkpoints, and starts the processes again when the group of pods changes.

    python -m rekindle.program.agent <the same flags as `rekindle step steps.program`>

The agent is a member of the coordinator's group (training/membership), as the workers of a workload
are. A *generation* is one run of the program's processes. A new generation starts whenever the
group of pods changes, as follows:

    1. The agent of rank 0 chooses the newest complete checkpoint in the object store, and each
       agent restores its files.
    2. Each agent starts the processes of its pod with the environment of torchrun or, in a job of
       another framework (job_pod.py), of this job's operator.
    3. A pod is lost: all processes are killed, and the next generation starts at once. A pod must
       leave (SIGTERM): all processes of all pods get SIGTERM, so that the program can save; then
       the pod uploads the checkpoint and exits with 143. A pod joins: the program is restarted
       after its next checkpoint.
    4. A process fails by itself: all processes are started again. After three failures without a
       newer step, the run ends with the message of the process that failed first.
    5. All processes have ended with exit code 0: the agent of rank 0 uploads the result.
"""

import signal

# block signals until a handler is installed, because the kernel discards signals without a handler
# for PID 1
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

import os
import sys
import threading
from contextlib import suppress

from argolocal.common import exit_codes, linux
from rekindle.errors import ConfigError, RekindleError, StorageError
from rekindle.program.exchange import ReportExchange
from rekindle.program.generation import GenerationOver, ProgramGeneration
from rekindle.program.pod import Pod
from rekindle.program.processes.working_folder import find_working_folder
from rekindle.program.spec import ProgramSpec
from rekindle.training.launch import notice, signals
from rekindle.training.membership.client import CoordinatorClient
from rekindle.training.membership.completion import read_completed_model
from rekindle.training.membership.protocol import read_coordinator_address
from rekindle.training.spec import Fingerprint


def run_generations(pod: Pod) -> int:
    """Run the program until its result is stored or this pod must leave; return the exit code.
    Raises RekindleError if the run was aborted."""
    pod.leaving = signals.install_sigterm_handler()
    threading.Thread(target=_announce_leaving, args=(pod,), daemon=True).start()

    generation = 0
    while not pod.leaving.is_set():
        group = pod.client.wait_for_group(
            generation, pod.checkpoints.newest_step, pod.leaving.is_set
        )
        if group is None:
            break

        generation, members = group
        with suppress(GenerationOver):
            ProgramGeneration(pod, ReportExchange(pod.client, generation, members), members).run()
        pod.client.is_busy = False

    pod.curves.close()
    pod.progress.close()
    if pod.client.is_complete:
        pod.checkpoints.remove()
        return 0

    pod.client.leave()
    return exit_codes.TERMINATED


def _announce_leaving(pod: Pod) -> None:
    pod.leaving.wait()
    pod.client.notify_waiters()


def run_agent(program_spec: ProgramSpec) -> int:
    """Run the program's processes of this pod; return the exit code. Raises RekindleError."""
    coordinator_endpoint = read_coordinator_address()
    if coordinator_endpoint is None:
        raise ConfigError(
            "MASTER_ADDR is not set: a program runs under a coordinator. Start it with `rekindle"
            " run` or in a job of a pipeline."
        )

    linux.LIBC.prctl(linux.SET_CHILD_SUBREAPER, 1)
    os.chdir(find_working_folder(program_spec.program.command))
    fingerprint: Fingerprint = {"program": program_spec.identity_hash()[:12]}
    client = CoordinatorClient(
        *coordinator_endpoint, fingerprint, lambda: bool(read_completed_model(program_spec))
    )
    try:
        pod = Pod(program_spec, client)
        notice.start_polling_process()
        return run_generations(pod)
    except RekindleError as error:
        is_temporary_error = isinstance(error, StorageError)
        client.report_error(str(error), error.exit_code, is_temporary=is_temporary_error)
        raise


def main(argv: list[str]) -> int:
    try:
        return run_agent(ProgramSpec.from_flags(argv))
    except RekindleError as error:
        from rekindle.step import fail

        return fail(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

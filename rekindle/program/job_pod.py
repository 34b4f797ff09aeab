"""The first process of a pod that runs a program in a job of another framework: starts the agent
and, in the pod with rank 0, the coordinator. Trials of a sweep (trials/run.py) also use the module
job_pod.

    python -m rekindle.program.job_pod <the same flags as `rekindle step steps.program`>

The exit code decides what the job does (restartPolicy ExitCode): exit code 0 completes the job. An
exit code from 1 to 127 means that the coordinator has ended the run with an error, and fails the
job. Exit code 143 restarts the pod, also after an error that concerns only this pod.
"""

import signal

# block signals until `run` waits for them, because the kernel discards signals without a handler
# for PID 1
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess

from argolocal.common import exit_codes
from argolocal.common.linux import die_with_parent
from rekindle.errors import ConfigError, write_stderr
from rekindle.kubernetes_names import POD_IP, REKINDLE_COORDINATOR
from rekindle.program import agent, coordinator
from rekindle.program.position import read_pod_position
from rekindle.step import fail

HANDLED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
# maximum number of seconds to wait for the other process after the end of the run
COORDINATOR_END_TIMEOUT_S = 60.0
# maximum wait for the coordinator's verdict on an agent's error
VERDICT_TIMEOUT_S = 5.0
# time between two starts of the coordinator
RESTART_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.5
FORK_CONTEXT = multiprocessing.get_context("fork")

MainFunction = Callable[[list[str]], int]


class JobPod:
    """The agent of one pod and, in the pod with rank 0, the coordinator. `restart_code`: exit code
    of the pod after an error that concerns only this pod."""

    def __init__(
        self,
        command_flags: list[str],
        *,
        is_leader: bool,
        restart_code: int = exit_codes.TERMINATED,
    ) -> None:
        """Start the agent and the coordinator. HANDLED_SIGNALS must be blocked in this process."""
        self.flags = command_flags
        self.restart_code = restart_code
        self.coordinator: ForkProcess | None = None
        if is_leader:
            self.coordinator = self._start(coordinator.main)
        self.agent = self._start(agent.main)

    def run(self) -> int:
        """Wait until the run is over or this pod must leave; return the exit code."""
        while True:
            received_signal = signal.sigtimedwait(HANDLED_SIGNALS, POLL_INTERVAL_S)
            if received_signal and received_signal.si_signo != signal.SIGCHLD:
                self.agent.terminate()

            if self.agent.exitcode is not None:
                return self._end_with_agent(self.agent.exitcode)
            if self.coordinator and self.coordinator.exitcode is not None:
                coordinator_exit_code = self.coordinator.exitcode
                if coordinator_exit_code >= 0:
                    return self._end_with_coordinator(coordinator_exit_code)
                write_stderr(
                    f"the coordinator was ended by {signal.Signals(-coordinator_exit_code).name}:"
                    " starting it again"
                )
                time.sleep(RESTART_INTERVAL_S)
                self.coordinator = self._start(coordinator.main)

    def _start(self, main_function: MainFunction) -> ForkProcess:
        forked_process = FORK_CONTEXT.Process(
            target=_run_main, args=(main_function, self.flags, os.getpid())
        )
        forked_process.start()
        return forked_process

    def _end_with_agent(self, agent_exit_code: int) -> int:
        """Return the exit code of the pod after the agent has ended."""
        if agent_exit_code == 0:
            self._wait_for_coordinator(COORDINATOR_END_TIMEOUT_S)
            return 0

        if agent_exit_code in (exit_codes.TERMINATED, -signal.SIGTERM):
            self._stop_coordinator()
            return exit_codes.TERMINATED

        coordinator_exit_code = self._wait_for_coordinator(VERDICT_TIMEOUT_S)
        if coordinator_exit_code and coordinator_exit_code > 0:
            return coordinator_exit_code
        self._stop_coordinator()
        write_stderr(f"the agent of this pod ended with code {agent_exit_code}: starting again")
        return self.restart_code

    def _end_with_coordinator(self, coordinator_exit_code: int) -> int:
        """Return the exit code of the pod after the coordinator has ended the run."""
        self.agent.join(COORDINATOR_END_TIMEOUT_S)
        if self.agent.exitcode is None:
            self.agent.kill()
            self.agent.join()
        return coordinator_exit_code

    def _wait_for_coordinator(self, timeout_seconds: float) -> int | None:
        """Return the exit code of the coordinator; None if the coordinator does not end in time."""
        if self.coordinator is None:
            return None
        self.coordinator.join(timeout_seconds)
        return self.coordinator.exitcode

    def _stop_coordinator(self) -> None:
        if self.coordinator:
            self.coordinator.terminate()
            if self._wait_for_coordinator(COORDINATOR_END_TIMEOUT_S) is None:
                self.coordinator.kill()
                self.coordinator.join()


def _run_main(main_function: MainFunction, command_flags: list[str], parent_pid: int) -> None:
    """Run `main_function` in its own process group, so that it receives only signals from its
    parent."""
    os.setpgid(0, 0)
    die_with_parent(parent_pid)
    # `main_function` unblocks SIGTERM once it has installed a handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    sys.exit(main_function(command_flags))


def main(argv: list[str]) -> int:
    try:
        pod_position = read_pod_position()
        if pod_position is None:
            raise ConfigError(f"{REKINDLE_COORDINATOR} is not set: the job of a pipeline sets it.")
    except ConfigError as error:
        return fail(error)

    is_leader = pod_position.rank == 0
    if is_leader:
        # use the pod's own address, because Kubernetes creates the DNS name later than the pod
        os.environ[REKINDLE_COORDINATOR] = os.environ.get(POD_IP) or "127.0.0.1"
    return JobPod(argv, is_leader=is_leader).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

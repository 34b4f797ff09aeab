"""Exit codes of processes, named after their meaning here, unlike the constants in sysexits.h."""

# exit code of Argo's executor: the command could not run, or a Kubernetes object failed
EXECUTOR_ERROR = 64
INVALID_DATA = 65
# the user's code raised an exception that would occur again in a retry
CODE_ERROR = 70
# a service is unavailable
UNAVAILABLE = 75
INVALID_CONFIG = 78
# exit codes of failures that a retry cannot fix
PERMANENT_ERRORS = (INVALID_DATA, CODE_ERROR, INVALID_CONFIG)

# base of the exit codes of processes that a signal ended: 128 + number of the signal
SIGNAL_OFFSET = 128
HUNG_UP = 129  # SIGHUP
INTERRUPTED = 130  # Ctrl-C
KILLED = 137  # SIGKILL
TERMINATED = 143  # SIGTERM

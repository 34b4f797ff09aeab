"""Exit codes of processes by their meaning; the names of sysexits.h do not tell it."""

# exit code of Argo's executor: the command could not run, or a Kubernetes object failed
EXECUTOR_ERROR = 64
INVALID_DATA = 65
CODE_ERROR = 70  # an exception of the user's code that a retry would raise again
UNAVAILABLE = 75  # a service is unavailable
INVALID_CONFIG = 78
# exit codes of failures that a retry cannot fix
PERMANENT = (INVALID_DATA, CODE_ERROR, INVALID_CONFIG)

# base of the exit codes of processes that a signal ended: 128 + number of the signal
SIGNALLED = 128
HUNG_UP = 129  # SIGHUP
INTERRUPTED = 130  # Ctrl-C
KILLED = 137  # SIGKILL
TERMINATED = 143  # SIGTERM

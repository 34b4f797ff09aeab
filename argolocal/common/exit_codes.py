"""Exit codes of processes by their meaning; the names of sysexits.h do not tell it."""

EXECUTOR_ERROR = 64  # of Argo's executor: the command could not run, or an object has failed
INVALID_DATA = 65
CODE_ERROR = 70  # an exception of the user's code that a retry would raise again
UNAVAILABLE = 75  # a service is unavailable
INVALID_CONFIG = 78
PERMANENT = (INVALID_DATA, CODE_ERROR, INVALID_CONFIG)  # a retry cannot help

SIGNALLED = 128  # a signal has ended the process: plus the number of the signal
HUNG_UP = 129  # SIGHUP
INTERRUPTED = 130  # Ctrl-C
KILLED = 137  # SIGKILL
TERMINATED = 143  # SIGTERM

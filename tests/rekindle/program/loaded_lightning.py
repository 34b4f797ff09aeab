"""Lightning, which the forkserver of the tests has imported."""

import lightning  # noqa: F401

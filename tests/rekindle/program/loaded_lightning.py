"""Import Lightning, which the forkserver of the tests needs."""

import lightning  # noqa: F401

"""The training engine: virtual workers, groups that come and go, checkpoints, and the loop that uses them."""

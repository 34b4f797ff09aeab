"""The training engine: virtual workers, groups whose members change, checkpoints, and the training
loop."""

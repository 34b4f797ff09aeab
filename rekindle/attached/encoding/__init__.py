"""Converts training states to bytes and back, for snapshots in memory and for checkpoints of
sharded models."""

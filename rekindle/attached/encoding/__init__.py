"""The bytes of states: in memory, and in the checkpoints of sharded models."""

"""Many real launchers on one machine: their network, their processes, and their workers."""

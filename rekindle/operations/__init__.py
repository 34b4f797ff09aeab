"""The actions of the commands on runs: forecast, reproduce, backfill, reuse, roll back, scale,
remove."""

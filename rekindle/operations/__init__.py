"""The actions of the commands that work on runs: forecast, reproduce, backfill, reuse, roll back,
scale, remove."""

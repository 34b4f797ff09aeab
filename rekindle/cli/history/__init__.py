"""The commands `rekindle backfill` and `rekindle sweep`."""

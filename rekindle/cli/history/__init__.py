"""The commands `rekindle backfill`, `rekindle reproduce` and `rekindle sweep`."""

"""Convert raw transactions to features: the dataset on disk, and the serving state."""

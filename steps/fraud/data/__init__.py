"""From raw transactions to features: the dataset on disk, and what a server needs to know of the past."""

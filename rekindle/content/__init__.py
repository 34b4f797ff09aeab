"""Content from outside: datasets, weights and releases that were downloaded from the object store,
answers by HTTP, and manifests."""

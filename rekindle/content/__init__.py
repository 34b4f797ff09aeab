"""Read and verify untrusted content: datasets, weights and releases from the object store, HTTP
responses, and manifests."""

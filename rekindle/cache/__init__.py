"""Work that is not done twice: outputs of a step, found by what they are a function of (docs/cache.md)."""

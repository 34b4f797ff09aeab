"""The list of all benchmarks, and the page with their figures."""

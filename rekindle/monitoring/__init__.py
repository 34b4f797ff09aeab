"""What happens after a run: people are told."""

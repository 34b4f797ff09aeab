"""What happens after a run: people are told, and what a released model sees is watched."""

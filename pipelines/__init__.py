"""What runs where: Hera definitions, their rendering, and the places that run them. Never imports torch."""

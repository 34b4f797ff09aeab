"""What a pipeline ends with, beside what it trains and serves."""

"""Forecast, reproduce, repeat, reuse, roll back, scale and remove runs, as the commands ask."""

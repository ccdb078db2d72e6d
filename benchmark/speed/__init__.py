"""Measurements of the simulation's speed: ``make bench``, or ``python -m benchmark.speed CASE``."""

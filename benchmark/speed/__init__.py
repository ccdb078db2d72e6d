"""How fast the simulation is, measured: ``make bench``, or ``python -m benchmark.speed CASE``."""

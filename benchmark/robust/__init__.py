"""Hostile clients: what they send (``attacks``, a delivery), and rules that bear it (``aggregation``), by ByzFL."""

from benchmark.robust.aggregation import RobustAggregation
from benchmark.robust.attacks import Byzantine

__all__ = ["Byzantine", "RobustAggregation"]

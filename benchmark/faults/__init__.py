"""Faults of clients and networks, and what bears them, as deliveries: lost, late, broken and refused uploads."""

from benchmark.faults.clock import VirtualClock
from benchmark.faults.dropouts import Dropouts
from benchmark.faults.injected import InjectedFaults
from benchmark.faults.validation import Validation

__all__ = ["Dropouts", "InjectedFaults", "Validation", "VirtualClock"]

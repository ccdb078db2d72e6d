"""Older place of :class:`benchmark.ranks.strategy.RanksStrategy`, which configurations of older runs name."""

from benchmark.ranks.strategy import RanksStrategy

__all__ = ["RanksStrategy"]

"""Checks of the contracts of methods, server rules, partitions and sources, for built-in and for custom classes."""

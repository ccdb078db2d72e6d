"""Figures about runs and their data."""

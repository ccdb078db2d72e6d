"""Boards: one frozen setting with its rows, to which anybody may submit finished runs (docs/boards.md)."""

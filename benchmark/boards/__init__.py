"""Boards: frozen settings with ranked rows, to which finished runs can be submitted (docs/boards.md)."""

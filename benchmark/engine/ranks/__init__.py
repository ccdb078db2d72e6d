"""Simulate one federation with several processes.

Open ``ranks`` for what a process knows of the others, ``placed_store`` for where each client's rows lie.
"""

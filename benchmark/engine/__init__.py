"""Run a method's contract for many clients at once, under Lightning; a method's author never opens it.

The files here are the round: ``rounds`` (the server's callback), ``simulation`` (a cohort's way through a round),
``evaluation``, ``local_training`` and ``step_function`` (one step), ``mapping`` (one function for many clients),
``cohort`` and ``roles``. The folders hold the rest: ``plan``, ``batches``, ``repeat``, ``refusals``, ``ranks``,
``device``. Each says in its ``__init__`` which of its files to open. docs/engine.md tells a round's way from top to
bottom.
"""

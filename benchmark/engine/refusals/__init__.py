"""Refuse what would give wrong numbers before it does: mistakes of authors, payloads, settings of the Trainer.

Open ``author_errors`` for how a mistake in a method is told, ``payload_checks`` for what rules and methods hand over,
``finite`` for clients that diverged, ``watch`` for steps that would couple clients, ``trainer_settings`` and
``trainer_callbacks`` for what of Lightning a federated run can have.
"""

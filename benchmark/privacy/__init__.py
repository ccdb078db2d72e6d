"""Differential privacy of a federation: what is clipped and noised, and what that guarantees.

``user_level`` is a server's rule around any other, ``account`` says what its rounds have cost.
"""

from benchmark.privacy.user_level import UserLevelPrivacy

__all__ = ["UserLevelPrivacy"]

"""Lay a round and an evaluation out before they begin: whose step comes when, on which images.

Open ``work`` for what one cohort does (``CohortWork``, ``Part``, ``Step``), ``round_plan`` for the order of images in
a round, ``evaluation_plan`` for who is scored where. Nothing here reads an image or touches a device.
"""

"""Rows of a table tuned alike: the same number of trials each, chosen on held-out training images."""

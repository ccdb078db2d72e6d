"""Runs the contract of a method for many clients at once, under Lightning; a method's author never opens it."""

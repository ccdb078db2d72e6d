"""Configurations: YAML files and what they are composed of, the command line, and the classes that both may name."""

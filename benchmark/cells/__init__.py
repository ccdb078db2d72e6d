"""Many runs, each exactly once: which run a cell is, who runs it, and where."""

"""What every method and every partition must keep, as functions that anybody's can be given."""

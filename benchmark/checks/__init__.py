"""What every method, partition and source must keep, as functions that anybody's can be given."""

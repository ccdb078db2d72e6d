"""A method of the suite between real machines, on Flower: the same rule, the same clients, other processes."""

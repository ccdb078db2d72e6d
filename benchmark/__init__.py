"""The engine of the benchmark: federated rounds as Trainer epochs, cohorts of clients as one stacked step."""

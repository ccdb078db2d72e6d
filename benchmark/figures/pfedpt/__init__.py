"""The figures of the pFedPT paper."""

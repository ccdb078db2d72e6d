"""The processes (ranks) that one federation is shared by: how they start, meet, exchange values and notice an end."""

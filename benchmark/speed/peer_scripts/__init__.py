"""The same federation in other frameworks; these scripts run in environments of their own (see ``peers.py``)."""

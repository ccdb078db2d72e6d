"""The HTML page of everything recorded, and the notes on reproduction."""

"""One run: ``lightning-cli``, its directory, checkpoints and record, and the way back from them."""

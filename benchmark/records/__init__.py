"""What a finished run leaves behind: written, read, checked and grouped."""

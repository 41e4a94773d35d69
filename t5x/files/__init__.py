"""Local and remote files: opening, copying, locking, atomic writes, lines of text."""

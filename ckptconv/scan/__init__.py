"""Whether a file is safe to load."""

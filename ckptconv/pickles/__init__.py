"""Pickle streams as documents: read, followed, written, never executed."""

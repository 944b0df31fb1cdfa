"""Tensors as references to bytes: dtypes, values as streams, casts, checksums, comparison."""

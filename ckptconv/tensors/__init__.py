"""Tensors as references to bytes: element types, values as streams, casts, checksums, comparison."""

"""Live tensors: the only package that makes them, and the only one that saves them."""

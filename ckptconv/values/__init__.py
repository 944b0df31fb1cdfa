"""What the values of a checkpoint are: statistics of its tensors, and the values themselves."""

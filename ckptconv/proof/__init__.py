"""What proves that a checkpoint is what it was: digests of files and of tensors."""

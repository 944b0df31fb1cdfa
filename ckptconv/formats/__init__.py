"""One file per container: how its bytes are laid out, read, and (where ckptconv writes it) written."""

"""One file per container: how its bytes are laid out, read, and (of some) written."""

"""An open checkpoint: its tree, the state dicts in it, and what a conversion makes of them."""

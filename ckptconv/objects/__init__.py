"""What the objects that torch and its frameworks pickle mean, and the names that judge them."""

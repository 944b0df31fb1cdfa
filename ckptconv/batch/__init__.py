"""Many conversions: what they are, who runs them, and what became of each."""

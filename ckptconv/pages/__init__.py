"""The page about a checkpoint, or about two: one HTML file to look at, without a network."""

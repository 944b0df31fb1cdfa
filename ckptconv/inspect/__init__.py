"""The facts about checkpoints, and the command that makes one portable."""

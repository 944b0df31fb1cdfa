"""Why a checkpoint will not load, or will disappoint, and the command that fixes it."""

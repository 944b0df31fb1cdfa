"""Device tags, what becomes of them, and what devices this host has."""

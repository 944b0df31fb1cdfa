"""Where bytes come from and where they go: sources, destinations, CRC, inflating, staging."""

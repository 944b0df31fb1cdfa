"""How quantised weights are stored, scheme by scheme: each a row of `table.SCHEMES`."""

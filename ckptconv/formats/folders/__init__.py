"""One file per kind of checkpoint that consists of many files."""

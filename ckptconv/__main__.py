"""`python -m ckptconv`: the command line."""

from ckptconv.cli import main

main()

"""`python -m branchout` is the `branchout` command."""

from branchout.cli import main

main()

"""`python -m oracle`: the `oracle` command."""

from oracle.cli import main

main()

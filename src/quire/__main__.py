"""`python -m quire` is the command `quire`."""

from quire.cluster.cli import main

main()

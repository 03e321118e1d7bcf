"""`python -m paceline`: how a worker is started."""

from paceline.cli import main

main()

"""`python -m clipwise`."""

from .cli import run

run()

"""`python -m relay` is the command `relay`."""

from relay.command import main
from rl.utils.compat import exit_after

if __name__ == "__main__":
    exit_after(main)

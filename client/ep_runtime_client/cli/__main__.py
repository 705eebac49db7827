"""`python -m ep_runtime_client.cli`: the command, if its script is not on PATH."""

import sys

from ep_runtime_client.cli import main

if __name__ == "__main__":
    sys.exit(main())

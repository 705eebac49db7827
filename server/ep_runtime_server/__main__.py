"""`python -m ep_runtime_server`: what `ep-runtime serve` starts."""

import sys

from ep_runtime_server.main import main

sys.exit(main())

"""`python -m ep_runtime_server`: the program that `ep-runtime serve` starts."""

import sys

from ep_runtime import env

env.quiet_grpc()  # gRPC reads this setting at import

from ep_runtime_server.main import main  # noqa: E402

sys.exit(main())

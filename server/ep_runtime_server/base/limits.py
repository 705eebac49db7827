"""Times and bounds of the daemon and of its protocol."""

from __future__ import annotations

HEARTBEAT_INTERVAL_S = 2.0
SUSPECT_AFTER_S = 10.0
ATTACH_TOKEN_LIFE_S = 10.0
ENDED_SESSION_LIFE_S = 600.0
MAX_ENDED_SESSIONS = 1000
OPERATION_LIFE_S = 600.0
FD_CONNECTION_IDLE_S = 10.0
ACCEPT_PAUSE_S = 0.2
MAX_FD_CONNECTIONS = 1024
MAX_FD_CONNECTIONS_PER_UID = 256
# Extra connections besides one per session, for sessions that restart at once.
SPARE_API_CONNECTIONS = 256
REAPER_INTERVAL_S = 0.25
DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 3600.0
DEFAULT_DRAIN_S = 30.0
# How long a restarted daemon waits for earlier processes; a client reconnects within seconds.
DEFAULT_RECOVERY_S = 30.0
LATE_AFTER_S = 10.0
# Between the daemons of a cluster: a report may be late by several before the lease is over.
NODE_REPORT_INTERVAL_S = 2.0
NODE_LEASE_S = 10.0
NODE_RPC_S = 4.0
# Waits less for another node, so that a list of the others is not late.
NODE_READ_S = 2.0
# A page, and its last row, which may be as long.
NODE_READ_BYTES = 4 << 20
NODE_LEAVE_S = 1.0
NODE_RETRY_FIRST_S = 0.1
NODE_RETRY_MOST_S = 1.0
NODE_REFUSED_RETRY_S = 5.0
# One wait of a node for the others; it asks again.
NODE_POLL_S = 5.0
# News are collected for this long per waiting node before they are sent.
NODE_NEWS_EACH_S = 0.002
# Claims live on between two such waits.
NODE_CLAIM_LIFE_S = 3.0
# A spec that is not that of the others is known for so long: their claims may be on the way.
NODE_DIFFERS_S = 1.0
# A node that was refused hears it in its next calls too: an answer may be lost on its way.
NODE_REFUSAL_LIFE_S = 15.0
# Of a node: as many processes of a job as may come with other specs within a moment.
MAX_REFUSED = 16
# From a view to every node's word on it: processes may have windows to map.
NODE_INIT_S = 600.0
NODE_TELL_S = 600.0
MAX_ASSEMBLIES = 4096
NODE_FORGOTTEN_S = 24 * 3600.0
MAX_NODES = 1024
MAX_VERSION_BYTES = 256
# Test switches; the daemon warns that they are on.
TESTING_SWITCHES = ("no-peer-pidfd",)

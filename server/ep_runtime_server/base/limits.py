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
# Reports between the daemons of a cluster; a node may miss several before its lease ends.
NODE_REPORT_INTERVAL_S = 2.0
NODE_LEASE_S = 10.0
NODE_RPC_S = 4.0
# Shorter than NODE_RPC_S, so that one slow node does not delay a list over all nodes.
NODE_READ_S = 2.0
# Largest answer read from another node: one page, plus a last row that may be as long.
NODE_READ_BYTES = 4 << 20
NODE_LEAVE_S = 1.0
NODE_RETRY_FIRST_S = 0.1
NODE_RETRY_MOST_S = 1.0
NODE_REFUSED_RETRY_S = 5.0
# How long one call of a node waits for the other nodes; the node then calls again.
NODE_POLL_S = 5.0
# The coordinator collects news for this long per waiting node before it sends them.
NODE_NEWS_EACH_S = 0.002
# How long the coordinator keeps a node's claims after one such call, until the next call.
NODE_CLAIM_LIFE_S = 3.0
# How long a refused spec counts as differing, because other nodes' claims may be on the way.
NODE_DIFFERS_S = 1.0
# How long a refused node's next calls get the refusal too, because an answer may get lost.
NODE_REFUSAL_LIFE_S = 15.0
# Refusals remembered per node: many processes of a job may send differing specs at once.
MAX_REFUSED = 16
# Time limit of all nodes' answers to a proposed view; long, because processes map windows.
NODE_INIT_S = 600.0
NODE_TELL_S = 600.0
# How long the coordinator waits for nodes that it tells of ended processes, and how long it gathers
# reports at most before it tells them of more.
NODE_ROUND_S = 0.3
# After this time a node tells the other nodes itself. It is longer than a running round, a pause
# and the next round.
NODE_TOLD_S = 1.2
MAX_ASSEMBLIES = 4096
NODE_FORGOTTEN_S = 24 * 3600.0
MAX_NODES = 1024
MAX_VERSION_BYTES = 256
# Test switches; the daemon warns if one is on.
TESTING_SWITCHES = ("no-peer-pidfd",)

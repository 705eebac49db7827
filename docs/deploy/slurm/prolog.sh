#!/bin/bash
# Run here: on one node by Slurm 22.05 and systemd 252, tests/deploy/test_slurm.py, and on two by
# stubs of them, tests/deploy/test_slurm.py.
#
# Starts a job's daemon on each of its nodes, as the job's user, before the job's first step. Slurm runs
# it as root; where it fails, Slurm drains the node and queues the job again. In slurm.conf:
#     Prolog=/etc/slurm/ep-runtime/prolog.sh
#     Epilog=/etc/slurm/ep-runtime/epilog.sh
#     PrologFlags=Alloc      # on all nodes of a job when it starts, not with a node's first step
# Daemons of a job of several nodes form a cluster over plain TCP, sealed with a secret of the job: it is
# made of the job's number and of /etc/slurm/ep-runtime/key, which is root's, and the same on all nodes.
set -euo pipefail

jobs=${EP_RUNTIME_JOBS:-/run/ep-runtime-jobs}
prefix=${EP_RUNTIME_PREFIX:-/opt/ep-runtime}
key=${EP_RUNTIME_KEY:-/etc/slurm/ep-runtime/key}
directory=$jobs/$SLURM_JOB_ID
gid=$(id -g "$SLURM_JOB_UID")
# The coordinator's, below those that Linux gives out (from 32768) and JAX's own of a job (from 61440). Two
# jobs have the same one only on the same first node, with numbers 16384 apart; JAX's are the same for
# numbers 4096 apart. The other nodes take what Linux gives them.
port=$((16384 + SLURM_JOB_ID % 16384))

install -d -m 755 "$jobs"
install -d -m 700 -o "$SLURM_JOB_UID" -g "$gid" "$directory"

options=(--dir "$directory")
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}")
if ((${#nodes[@]} > 1)); then
  (umask 077
    "$prefix/bin/python" - "$key" "$SLURM_JOB_ID" > "$directory/secret" <<'MAKES_THE_SECRET'
import hashlib, hmac, sys
with open(sys.argv[1], "rb") as file:
    print(hmac.new(file.read(), sys.argv[2].encode(), hashlib.sha256).hexdigest())
MAKES_THE_SECRET
    chown "$SLURM_JOB_UID:$gid" "$directory/secret")
  options+=(--node "$SLURMD_NODENAME" --insecure --secret "$directory/secret")
  if [[ $SLURMD_NODENAME == "${nodes[0]}" ]]; then
    options+=(--coordinator "${nodes[0]}:$port")
  else
    options+=(--join "${nodes[0]}:$port" --listen "$SLURMD_NODENAME:0")
  fi
fi

# Returns when the daemon serves. systemd, not slurmd, is its parent: it starts one again that dies, and
# holds windows meanwhile.
systemd-run --quiet --collect --unit "ep-runtime-job-$SLURM_JOB_ID" \
  --uid "$SLURM_JOB_UID" --gid "$gid" \
  --property Type=notify --property Restart=on-failure --property RestartSec=100ms \
  --property FileDescriptorStoreMax=4096 --property LimitNOFILE=1048576 \
  --property WatchdogSec=30 --property UMask=0077 \
  --property KillMode=mixed --property TimeoutStopSec=10 \
  "$prefix/bin/ep-runtime" serve "${options[@]}" --drain-s 0

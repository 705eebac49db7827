#!/bin/bash
# Run here: on one node by Slurm 22.05 and systemd 252, tests/deploy/test_slurm.py, and on two by
# stubs of them, tests/deploy/test_slurm.py.
#
# Ends what prolog.sh started, when the job's processes are gone: its memory is free again. Where this
# fails, Slurm drains the node.
set -euo pipefail

unit=ep-runtime-job-$SLURM_JOB_ID
if systemctl is-active --quiet "$unit"; then systemctl stop "$unit"; fi
rm -rf "${EP_RUNTIME_JOBS:-/run/ep-runtime-jobs}/$SLURM_JOB_ID"

"""Trains the model of train_nnx.py in two processes on one host.

Run `python two_processes.py --folder /tmp/run`: it starts both, on two GPUs, else with 4 CPU
devices each. Or start each yourself: the same command with `--process 0` and with `--process 1`.
Options of train_nnx.py go through.
"""

import argparse
import subprocess
import sys

import jax
import train_nnx  # in the same folder

PROCESSES = 2


def run_process(args, options):
    jax.config.update("jax_num_cpu_devices", 8 // PROCESSES)  # changes nothing on GPUs
    # Before connect(), because the session asks JAX which processes the job has.
    jax.distributed.initialize(
        args.coordinator,
        num_processes=PROCESSES,
        process_id=args.process,
        local_device_ids=[args.process],  # its GPU; CPU devices are all its own
    )
    train_nnx.main(options)  # its connect() finds the host's daemon; the first process starts it


def start_all():
    """Starts this script once per process. All print the same losses, so one is shown."""
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--process", str(process)],
            stdout=None if process == 0 else subprocess.DEVNULL,
        )
        for process in range(PROCESSES)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"exit codes of the processes: {codes}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--process", type=int, help="which one this is; without, starts all")
    parser.add_argument("--coordinator", default="localhost:8476", help="process 0's address")
    args, options = parser.parse_known_args()
    if args.process is None:
        start_all()
    else:
        run_process(args, options)

"""The death that `ep-runtime demo --survive` shows, and its messages."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import numpy as np

import ep_runtime as ep
from ep_runtime_client import cli
from ep_runtime_client.demo.config import DemoConfig
from ep_runtime_client.demo.reporter import Report, Reporter
from ep_runtime_client.jobs.members import Member


class Death:
    """Makes the last process kill itself in a step half way; the others report it.

    Attributes:
        every: number of steps between copies of the state. Death comes two steps after a copy, so
            that a step is repeated and its losses can be compared.
    """

    def __init__(self, config: DemoConfig, member: Member, reporter: Reporter) -> None:
        self.every = max(config.steps // 10, 2)
        self._step = config.steps // 2 // self.every * self.every + 1
        self._member, self._reporter = member, reporter
        self._word = Path(member.directory) / "died.json"
        self._before: list[np.float32] = []
        self._making_s: float | None = None  # time to make group and step after the loss

    def strike(self, done: int) -> None:
        """Kills the last process at its step. `done`: steps so far."""
        if done == self._step and self._member.index == self._member.processes - 1:
            self._word.write_text(json.dumps({"pid": os.getpid(), "at": time.monotonic()}))
            os.kill(os.getpid(), signal.SIGKILL)

    def say_who(
        self, generation: ep.distributed.Generation, fitted: ep.distributed.FittedMesh
    ) -> None:
        """Reports which process died and how many continue."""
        live = {device.process_index for device in generation.devices}
        idle = f", {len(fitted.idle)} idle" if fitted.idle else ""
        self._reporter.say(
            f"process {self._member.processes - 1} (pid {self._told()['pid']}) was killed in step "
            f"{self._step + 1}; {len(live)} processes go on with {fitted.mesh.size} devices{idle}"
        )

    def made(self, report: Report, seconds: float) -> None:
        """Records the training so far, and the time that the new group and step took."""
        self._before, self._making_s = list(report.losses), seconds

    def say_how_it_went_on(self, step: int, loss: np.float32) -> None:
        """Reports the time of the recovery, after the first new step, which has the number
        `step`."""
        if self._making_s is None:
            return
        seconds = time.monotonic() - self._told()["at"]
        again = f", the first time {self._before[step - 1]:.3f}" if step <= self._step else ""
        self._reporter.say(
            f"step {step} is done {seconds:.1f} s after the kill, {self._making_s:.1f} s of them "
            f"for the new step: loss {loss:.3f}{again}; last loss before {self._before[-1]:.3f}"
        )
        self._making_s = None

    def show_events(self, address: str) -> None:
        """Runs the operators' commands that show the death."""
        since = math.ceil(time.monotonic() - self._told()["at"]) + 1
        kinds = [
            word
            for kind in ("session.dead", "group.broken", "group.formed")
            for word in ("--type", kind)
        ]
        for words in (["sessions", "--all"], ["events", *kinds, "--since", f"{since}s"]):
            self._reporter.say(f"$ ep-runtime {' '.join(words)}")
            cli.main([*words, "--address", address])

    def _told(self) -> dict[str, float]:
        told: dict[str, float] = json.loads(self._word.read_text())
        return told

"""The loop of a job that survives losses: one generation for each set of living processes.

Every process meets all others that live at the end of each step, in `live_processes` of JAX's
coordination service. All get the same answer there, so all end a generation at the same step.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax

from ep_runtime import errors
from ep_runtime_client.base import jax_internals
from ep_runtime_client.base.layers import live_groups
from ep_runtime_client.daemons.departures import departures
from ep_runtime_client.distributed.peers import For, peers, service
from ep_runtime_client.programs import failures

_log = logging.getLogger("ep_runtime")

# Errors of a step that the death of a process or the end of a group can cause.
_OF_A_LOSS = (
    errors.PeerLostError,
    errors.OpTimeoutError,
    errors.StaleHandleError,
    errors.GroupNotReadyError,
    errors.GroupBusyError,
)
# Generations of the same processes in which no step was done, before the error is raised.
_ATTEMPTS = 3
# Keys in the coordination service: the last meeting of a generation, how many generations are over,
# and whether the loop has ended without a loss. A process that comes back reads the latter two.
_FINISHED = "ep_runtime/finished/"
_HISTORY = "ep_runtime/history/"
_PAST, _ENDED = "past", "finished"
_loops = itertools.count()  # of this process

_P = ParamSpec("_P")
_R = TypeVar("_R")


def generations(*, stuck_after_s: float | None = 1800.0) -> Iterator[Generation]:
    """Yields a Generation for each set of live processes, until one ends without a loss.

    Use each as a context manager. Inside, make mesh, group and compiled step for its devices, and
    run every program that has collectives by `Generation.step`. If a process dies or comes back,
    the block ends in all others. The loop closes the groups made inside, and goes on with a
    generation of the devices that live. Give a group another name in each generation.

    Args:
        stuck_after_s: a process that lives is fenced and killed once all others have waited for it
            for so long, for the results of a step or at its end. They may wait for work that it
            does alone, so take longer than the longest compilation, checkpoint or read of data. The
            loop cannot know how long these take, so the default is 30 minutes. None waits for as
            long as the process lives.

    Returns:
        An iterator of generations.

    Raises:
        InvalidArgumentError: `initialize` was not called, or `stuck_after_s` is not positive.

    Cost: one meeting of all processes, and two after a loss.

    Examples:
        >>> losses = []
        >>> def train(generation, step=0):  # for generation in ep.distributed.generations():
        ...     with generation:
        ...         mesh = Mesh(generation.devices, ("ep",))  # and the group, and the state
        ...         losses.append(generation.step(lambda: jnp.float32(1.5)))
    """
    if jax_internals.distributed() is None or jax_internals.distributed().client is None:
        raise errors.InvalidArgumentError(
            "ep.distributed.generations() needs ep.distributed.initialize() before it",
            argument="initialize",
        )
    if stuck_after_s is not None and not stuck_after_s > 0:
        raise errors.InvalidArgumentError(
            f"stuck_after_s must be positive or None, got {stuck_after_s}", argument="stuck_after_s"
        )
    jax_internals.learn_topology()
    with peers.watched(stuck_after_s):
        begun = next(_loops) == 0 and _history() is not None
        members, attempts = _live(For.OTHERS, "begin", _every()), 0
        if begun:  # the others meet again after this process has come back
            members = _settled("back", members)
        else:
            service().key_value_delete(_HISTORY + _ENDED)
            _say_past(0)
        while True:
            past, ended = _history() or (0, False)
            if ended:
                _log.warning("the others have finished the loop, so this process leaves it too")
                return
            before = live_groups.all()
            generation = Generation(past, members)
            yield generation
            if not generation.over:
                return
            _settle_groups(before)
            attempts = 0 if generation.steps or generation.following != members else attempts + 1
            if attempts == _ATTEMPTS:
                raise generation.over[0]
            _say_past(past + 1)  # the same in all processes
            jax_internals.renew_cpu()
            # All meet again. Then no process still writes a copy of the state that another reads,
            # and all have forgotten their old connections.
            members = _settled(generation.key, generation.following)


def _history() -> tuple[int, bool] | None:
    """How many generations are over, and whether the loop has ended; None if none has begun."""
    told = {name.rpartition("/")[2]: value for name, value in service().key_value_dir_get(_HISTORY)}
    return (int(told[_PAST]), _ENDED in told) if _PAST in told else None


def _say_past(past: int) -> None:
    service().key_value_set(_HISTORY + _PAST, str(past), True)


def _settle_groups(before: Collection[Any]) -> None:
    """Closes groups that are over, and all made since `before`: calls of others in them end too.
    Waits until copies of the state that have begun are written."""
    for live in live_groups.all():
        live.settle()
        group = getattr(live, "group", None)  # copies of the state have none
        if group is not None and (live.is_gone or live not in before):
            group.close()


def _every() -> list[int]:
    return sorted({d.process_index for d in jax.devices()})


def _live(what: For, meeting: str, members: Collection[int]) -> dict[int, int]:
    """Returns the live processes, once all of them have met; `members` are the ones expected."""
    with peers.waiting(what, meeting, members):
        live = jax_internals.live_processes(_every())
    if len(live) != len(members):
        peers.passed({*_every()} - live.keys())
    return live


def _settled(meeting: str, members: dict[int, int]) -> dict[int, int]:
    """Meets until two meetings have the same processes; one that comes back does the same."""
    while True:
        live = _live(For.OTHERS, f"{meeting}/over", members)
        if live == members:
            return live
        members = live


class Generation:
    """The time in which one set of processes lives, as `generations` yields it.

    Attributes:
        number: 0 for the first one of the job.
        devices: of all processes that live, in the same order in all of them.
        steps: how many calls of `step` are done.
    """

    def __init__(self, number: int, members: dict[int, int]) -> None:
        self.number = number
        jax_internals.write_programs(min(members))
        departures.keep(members)
        peers.generation = number
        self.devices = [d for d in jax.devices() if d.process_index in members]
        self.steps = 0
        self.over: list[errors.EpRuntimeError] = []  # why the generation ended
        self.following = members
        self._members = members
        # Names these processes, the same in all of them.
        self.key = hashlib.sha256(repr(sorted(members.items())).encode()).hexdigest()
        self._built = False
        self._meetings = 0  # of this generation, the same in all processes

    def step(self, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Runs a step that all live processes do, or none.

        Arguments that the function donates are gone if the step fails: take them again from
        committed state, or from a copy.

        Args:
            function: the compiled step, or any function that runs programs with collectives.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            Its results, after all of them are ready in every process.

        Raises:
            PeerLostError: a process has died, or came back. Let it leave the `with` block.
            Exception: any other error of the function.

        Cost: waits for the results, and for all processes by one RPC to the coordination service.
        """
        self._begin()
        try:
            result = function(*args, **kwargs)
            with peers.waiting(For.RESULTS, self._meeting, self._members):
                jax.block_until_ready(result)
            for group in live_groups.all():
                group.require_whole()
        except Exception as error:
            self._failed(error)
            raise
        self._meet()
        if self._gone:
            raise self._end("during a step")
        if self.following != self._members:
            self._end("after a step")  # the next one raises it
        self.steps += 1
        return result

    def wait(self) -> NoReturn:
        """Waits while other processes train, because this one has no device in the mesh.

        It returns to the loop by an error that leaves the `with` block, when the others have
        finished or the generation is over.

        Raises:
            PeerLostError: the generation is over.
        """
        self._begin()
        while self.following == self._members:
            self._meet(For.STEPS)
            last = [int(value) for _, value in service().key_value_dir_get(self._finished_key())]
            if self._meetings in last:
                raise _FinishedError
        raise self._end("while this one waited")

    def _begin(self) -> None:
        """Raises if the generation is over. Before the first step all its processes meet."""
        if self.over:
            raise self.over[0]
        if not self._built:
            peers.publish()
            self._meet()
            self._built = True
            peers.learn()
            if self.following != self._members:
                raise self._end("before its first step")

    @property
    def _meeting(self) -> str:
        """A name of the next meeting, the same in all processes."""
        return f"{self.key}/{self._meetings}"

    def _meet(self, what: For = For.OTHERS) -> None:
        self.following = _live(what, self._meeting, self._members)
        self._meetings += 1

    @property
    def _gone(self) -> list[int]:
        return [p for p, one in self._members.items() if self.following.get(p) != one]

    def _end(self, when: str, why: str | None = None) -> errors.PeerLostError:
        gone, back = self._gone, sorted(self.following.keys() - self._members.keys())
        changed = [f"processes {gone} of the job died"] if gone else []
        changed += [f"processes {back} of the job came back"] if back else []
        error = errors.PeerLostError(
            f"generation {self.number} of {len(self._members)} processes is over: "
            + (why or f"{' and '.join(changed)} {when}"),
            process=next(iter(gone), -1),
        )
        self.over.append(error)
        _log.warning("%s; %d processes go on", error, len(self.following))
        return error

    def _failed(self, error: Exception) -> None:
        """Ends the generation if a loss caused the error; else returns.

        All others come to the meeting too, because a loss fails their steps.
        """
        if error in self.over:
            return
        told = failures.error_of(error)
        if not isinstance(told, _OF_A_LOSS) and not (
            told is None and isinstance(error, jax.errors.JaxRuntimeError)
        ):
            return
        self._meet()
        if self.following != self._members:
            raise self._end("during a step") from error
        if isinstance(told, _OF_A_LOSS):  # a process was fenced, or a group is over
            raise self._end("", str(told)) from error

    def _finished_key(self) -> str:
        return _FINISHED + self.key

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            self._finish()
            return False
        if isinstance(error, _FinishedError):
            return True
        if isinstance(error, Exception) and error not in self.over:
            try:
                self._failed(error)
            except errors.PeerLostError:
                return True
        return error in self.over

    def _finish(self) -> None:
        """Tells waiting processes the number of the last meeting, and takes part in it."""
        self.over.clear()
        service().key_value_set(_HISTORY + _ENDED, "yes", True)
        last = self._meetings + (1 if self._built else 2)
        service().key_value_set(self._finished_key() + "/last", str(last), True)
        while self._meetings < last:
            self._meet()


class _FinishedError(Exception):
    """Leaves the block of a process that waits for others."""

"""A job's state in memory of the node: committed by all processes or by none, and read back after
a process, or the whole job, is gone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ep_runtime.allowed_names import check_name
from ep_runtime.arguments import check_at_least, check_whole
from ep_runtime.errors import InvalidArgumentError, StaleHandleError
from ep_runtime_client.base import jax_state
from ep_runtime_client.distributed.peers import peers
from ep_runtime_client.groups.state_copy import (
    CopyMemory,
    HeldCopy,
    make_copy,
    opened_copy,
    spec_of,
)
from ep_runtime_client.groups.state_layout import Layout, StoredArray, bounds_of, make_layout
from ep_runtime_client.sessions.session import Session


class State:
    """The last two committed copies of a job's arrays, in memory of the node's daemon.

    They outlive every process: survivors and a restarted job read them without a disk. They do not
    outlive the node; checkpoints on a disk stay needed for that. All processes of the state must be
    on one node.
    """

    def __init__(self, session: Session, name: str = "state", *, retain_s: float = 600.0) -> None:
        """Makes a state without asking the daemon yet.

        Args:
            session: with a daemon that outlives this process. A restarted job finds its state by
                the session's job and `name`.
            name: `ep-runtime groups` and `buffers` show the copies as NAME/0 and NAME/1.
            retain_s: how long the copies outlive the job's last process.

        Raises:
            InvalidArgumentError: the daemon is private to this process, or there is none.
        """
        check_name("state", name)
        check_at_least("retain_s", retain_s, 0)
        self._client = session._open.client
        if not self._client.has_daemon or self._client.is_private:
            raise InvalidArgumentError(
                f"State {name!r} needs a daemon that outlives this process, and the session has "
                f'{self._client.address}; start one with `ep-runtime serve`, or connect to "node"',
                argument="session",
            )
        self.name = name
        self._retain_s = float(retain_s)
        self._names = (f"{name}/0", f"{name}/1")
        self._held: dict[str, HeldCopy] = {}
        self._last: tuple[str, int] | None = None  # the copy last written here, and its step
        self._generation = peers.generation  # of the job, when `_last` was written
        self._layout: tuple[Any, Layout] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ep-runtime-state")
        self._writing: Future[None] | None = None

    @jax_state.eager
    def commit(self, step: int, state: Any) -> None:
        """Starts to copy `state` as the state of `step`, and returns before the copy is written.

        Every process whose devices have a part of the state calls it, with the same steps. The step
        is committed once all of them have written; until then the copy before it stays. One
        process writes each part of an array, however many replicas it has. The caller may donate
        the arrays to the next step.

        Args:
            step: greater than the newest committed step.
            state: a pytree of `jax.Array`.

        Raises:
            InvalidArgumentError: a leaf is not an array, or the step is not a later one.
            SessionFencedError: the session was fenced.
            PeerLostError: a process was lost before it committed the step before; call `restore`.
            GroupNotReadyError: a process did not come within the session's timeout.
            PoolExhaustedError: the daemon's memory, or the user's quota, has no room for a copy.

        Cost: a copy to pinned host memory, at 50 GB/s of an H200, and from there to the daemon's,
        at some 20 GB/s. Both overlap steps if half of a GPU's unused memory has room for its
        arrays; else a step that donates them waits for the first. The first two calls, and those
        after a change of processes or shapes, allocate.
        """
        self._client.require_alive()  # a fenced process must not write
        check_whole("step", step, 0)
        leaves = _leaves(state)
        layout = self._layout_of(leaves)
        if not layout.own and not layout.table:  # no device of this process has a part
            return
        self.wait()
        if self._generation != peers.generation:  # no step was committed, so there was no restore
            self._begin()
        name = self._next_copy(step)
        held = self._writable(name, layout)
        arrays = list(leaves.values())
        staged = _to_host([_shard(arrays[p.leaf], p.device) for p in layout.own])
        self._last = (name, step)
        self._writing = held.writing = self._writer.submit(held.write, layout, staged, step)

    def wait(self) -> None:
        """Returns once this process has written its part of the last `commit`.

        Raises:
            OSError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @property
    def committed(self) -> int | None:
        """The newest step that all processes have committed; None if there is none.

        Cost: a few RPCs for a copy that this process does not write.
        """
        with self._copies() as copies:
            newest = _newest(copies)
            return copies[newest].committed if newest is not None else None

    @jax_state.eager
    def restore(self, abstract_state: Any) -> tuple[int, Any]:
        """Reads the newest step that all processes committed, into the shardings given.

        The devices may be other ones than those that wrote it. After a loss every process calls it
        before it commits again.

        Args:
            abstract_state: the committed tree, of `jax.ShapeDtypeStruct` with sharding or arrays.

        Returns:
            (step, state).

        Raises:
            StaleHandleError: no step of this state was committed.
            InvalidArgumentError: names, shapes or dtypes differ from those committed.

        Cost: this process' part is read once from memory.
        """
        import jax

        wanted = _leaves(abstract_state)
        with contextlib.suppress(OSError):  # that step is not committed
            self.wait()
        self._begin()
        with self._copies() as copies:
            newest = _newest(copies)
            if newest is None:
                raise StaleHandleError(
                    f"job {self._client.job!r} has no committed step of state {self.name!r} at "
                    f"{self._client.address}",
                    state=self.name,
                    job=self._client.job,
                )
            step, stored = copies[newest].committed, copies[newest].arrays()
            assert step is not None
            self._check_same(wanted, stored, step)
            arrays = [_placed(name, leaf, stored[name]) for name, leaf in wanted.items()]
        return step, jax.tree.unflatten(jax.tree.structure(abstract_state), arrays)

    def release(self) -> None:
        """Gives the memory of both copies back, once every process of the job has called it."""
        with contextlib.suppress(OSError):
            self.wait()
        held, self._held, self._last = self._held, {}, None
        for copy in held.values():
            copy.close()

    def _begin(self) -> None:
        """Forgets steps that a loss has left uncommitted."""
        self._generation, self._last = peers.generation, None
        for held in self._held.values():
            if not held.closed:
                held.forget_uncommitted()

    def _layout_of(self, leaves: Mapping[str, Any]) -> Layout:
        """The layout, computed once for equal arrays."""
        import jax

        key = tuple((n, x.shape, x.dtype, x.sharding) for n, x in leaves.items())
        if self._layout is None or self._layout[0] != key:
            self._layout = key, make_layout(leaves, jax.process_index())
        return self._layout[1]

    def _next_copy(self, step: int) -> str:
        """The copy that `step` may overwrite: never the newest that is committed."""
        if self._last is not None:
            last, before = self._last
            self._check_later(step, before)
            # Else, if a process dies now, no step would have the parts of all processes.
            self._held[last].wait_committed(before, self._client.timeout_s)
        else:
            with self._copies() as copies:
                newest = _newest(copies)
                if newest is None:
                    return self._names[0]
                self._check_later(step, copies[newest].committed)
            last = newest
        return self._names[1] if last == self._names[0] else self._names[0]

    def _check_later(self, step: int, before: int | None) -> None:
        if before is not None and step <= before:
            raise InvalidArgumentError(
                f"step must be greater than {before}, the newest step of state {self.name!r}, got "
                f"{step}; restore step {before}, or take another name",
                argument="step",
            )

    def _writable(self, name: str, layout: Layout) -> HeldCopy:
        import jax

        spec = spec_of(name, layout, self._retain_s, peers.generation)
        held = self._held.get(name)
        if held is not None and not held.closed and held.whole and held.spec == spec:
            return held
        if held is not None and not held.closed:
            held.close()  # also a broken one: no process forms it again
        self._held[name] = make_copy(self._client, spec, layout, jax.process_index())
        return self._held[name]

    @contextlib.contextmanager
    def _copies(self) -> Iterator[dict[str, CopyMemory]]:
        """Copies by name, of this process or of the daemon."""
        with contextlib.ExitStack() as opened:
            found = {}
            for name in self._names:
                held = self._held.get(name)
                if held is not None and not held.closed:
                    found[name] = held.copy
                elif (copy := opened.enter_context(opened_copy(self._client, name))) is not None:
                    found[name] = copy
            yield found

    def _check_same(
        self, wanted: Mapping[str, Any], stored: Mapping[str, StoredArray], step: int
    ) -> None:
        theirs = {name: (x.dtype, x.shape) for name, x in stored.items()}
        ours = {name: (str(x.dtype), tuple(x.shape)) for name, x in wanted.items()}
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise InvalidArgumentError(
                    f"abstract_state must be as committed at step {step} of state {self.name!r}: "
                    f"{name} is {_told(theirs.get(name))} there and {_told(ours.get(name))} here",
                    argument="abstract_state",
                )


def _told(about: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if about is None else f"{about[0]}{list(about[1])}"


def _leaves(state: Any) -> dict[str, Any]:
    """The arrays of a pytree by path.

    Raises:
        InvalidArgumentError: a leaf without shape, dtype and sharding, or of random keys.
    """
    import jax

    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if getattr(leaf, "sharding", None) is None:
            raise InvalidArgumentError(
                f"state{name} must be a jax.Array, or a jax.ShapeDtypeStruct with a sharding, got "
                f"{type(leaf).__name__}",
                argument="state",
            )
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise InvalidArgumentError(
                f"state{name} has dtype {leaf.dtype}; pass jax.random.key_data of it",
                argument="state",
            )
        found[name] = leaf
    return found


def _newest(copies: Mapping[str, CopyMemory]) -> str | None:
    steps = {name: step for name, copy in copies.items() if (step := copy.committed) is not None}
    return max(steps, key=steps.__getitem__, default=None)


def _shard(array: Any, device: Any) -> Any:
    return next(each.data for each in array.addressable_shards if each.device == device)


def _to_host(shards: Sequence[Any]) -> list[Any]:
    """Copies of shards in pinned memory of the host, which begin now: the shards may be donated.

    A program that gets them donated waits for these copies. So shards are copied on their device
    first, as far as half of the memory goes that no program has needed yet.
    """
    import jax

    room: dict[Any, int] = {}
    found = []
    for shard in shards:
        (device,) = shard.devices()
        left = room.setdefault(device, _unused_bytes(device) // 2)
        if shard.nbytes <= left:
            room[device] = left - shard.nbytes
            shard = shard.copy()
        found.append(jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host")))
    return found


def _unused_bytes(device: Any) -> int:
    """Bytes of a device that no program has needed so far; 0 if JAX does not count them."""
    counted = device.memory_stats() or {}
    return int(counted.get("bytes_limit", 0)) - int(counted.get("peak_bytes_in_use", 0))


def _placed(name: str, leaf: Any, stored: StoredArray) -> Any:
    """A new array with the leaf's sharding."""
    import jax

    def block(index: Any) -> Any:
        return stored.block(name, bounds_of(index, leaf.shape), leaf.dtype)

    make = functools.partial(jax.make_array_from_callback, leaf.shape, leaf.sharding, block)
    return make(dtype=leaf.dtype)

"""Gives every test eight CPU devices, and cleans up after each test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

# Before the CPU backend starts: jaxlib below 0.12 takes its thread pool's size from here.
os.environ.setdefault("PJRT_NPROC", "32")
# Without LLVM's expensive passes programs compute the same and compile in two thirds of the time.
# This holds for processes that tests start, too. CI's run on the newest JAX sets 0, as users have
# it.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# A shell that starts the tests in the background makes them, and their children, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import checkout  # noqa: F401 - first: it ends pytest where the packages are another checkout's
import fakes
import jax
import pytest
import tiers
from child_programs import run_program  # noqa: F401 - fixtures are found by name
from daemon_fixtures import address, admin, daemon, directory  # noqa: F401 - likewise
from harness import daemon_process, restarted  # noqa: F401 - likewise
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache

# Fusions go to LLVM without earlier passes of MLIR, in which XLA spent a third of the tests' time.
# Newer XLA does not know the flag, and ends a process that sets it.
_FUSION = "xla_cpu_use_fusion_emitters"
_CHOOSES_FUSION = jax.__version_info__ < (0, 11)
# Programs compile as one part, because one part per core takes a tenth longer: tests use all cores.
_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if _CHOOSES_FUSION and os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    _FLAGS += [f"--{_FUSION}=false"]
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

# Variables of the person who runs the tests; daemons and jobs of tests must not see them.
for _name in ("EP_RUNTIME_ADDRESS", "EP_RUNTIME_JOB", "EP_RUNTIME_DEBUG", "SLURM_JOB_ID"):
    os.environ.pop(_name, None)

if TYPE_CHECKING:
    from block_ways import Ways

jax.config.update("jax_num_cpu_devices", 8)

# Order: the first folders fail early if the product is broken; the last entries run last.
_FIRST = ("core", "ops", "csrc", "modes", "modules", "client", "server")
_LAST = ("training", "multiprocess", "demo", "bench")
_BY_COMMAND = ("slow", "transformers", "integrations")
# `--once` keeps every value of these parameters. JAX's releases change layouts and collectives, and
# each page is its own program.
_KEPT = ["explicit", "kind", "lead", "manual", "mesh", "name", "partitioning", "row", "transport"]
_KEPT += ["page"]
_DOSE_S = 12 * 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once",
        action="store_true",
        help="run each test function once for each transport, mesh and way to partition: with the "
        "first of its other parameters, such as recipes and sizes",
    )
    parser.addoption(
        "--dose",
        default="ci",
        help="how often tests marked `doses` repeat their fault: ci, full, or a number that no "
        "full dose exceeds",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Without -m, runs the quick tier, or all tests that a path or -k names."""
    if not config.option.markexpr:
        named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
        config.option.markexpr = "full" if named else "quick"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test with its tier, and as one of the full run, unless it runs by command alone."""
    if not any(map(item.get_closest_marker, _BY_COMMAND)):
        tier = tiers.tier_of(item.nodeid)
        item.add_marker(tier)
        item.add_marker("full")


@pytest.hookimpl(trylast=True)  # of the tests that -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--once"):
        first = {_what_is_run_once(item): item for item in reversed(items)}
        chosen = {id(item) for item in first.values()}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]
    items.sort(key=_place)
    if config.getoption("--dose") != "ci":
        for item in items:  # replaces the limits for CI's dose
            item.add_marker(pytest.mark.timeout(_DOSE_S), append=False)


def pytest_collection_finish() -> None:
    """Collects garbage less often: tests leave little, and searching all objects that JAX keeps
    takes a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    # Processes of tests may be killed while they compile: `child_programs.CACHE` is for the others.
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


def _place(item: pytest.Item) -> int:
    folder = item.path.parent.name
    if folder in _LAST:
        return len(_FIRST) + 1 + _LAST.index(folder)
    return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)


def _what_is_run_once(item: pytest.Item) -> tuple[str, ...]:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return item.nodeid.partition("[")[0], *(str(parameters.get(name)) for name in _KEPT)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forgets programs that a test traced under patches, so that no other test uses them."""
    yield
    jax.clear_caches()


@pytest.fixture
def dose(request: pytest.FixtureRequest) -> int:
    """How often the test repeats its fault: `--dose` picks one of the numbers in its mark."""
    doses: dict[str, int] = request.node.get_closest_marker("doses").kwargs
    chosen = request.config.getoption("--dose")
    return doses[chosen] if chosen in doses else min(doses["full"], int(chosen))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the figures of tests that ran at doses other than CI's."""
    if config.getoption("--dose") != "ci":
        for report in terminalreporter.getreports("passed"):
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{report.nodeid}: {name} {value}")


def on_nodes(*sizes: int) -> list[Any]:
    """Transport memfd on nodes of that many ranks, in the form that `make_group` takes."""
    return [pytest.param(f"memfd/{size}", marks=pytest.mark.slow) for size in sizes]


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles programs as users do, for tests of bits that optimization might change."""
    given = compiler.get_compile_options

    def options_of_users(*args: Any, **more: Any) -> Any:
        overrides = {_FUSION: True} | (more.pop("env_options_overrides", None) or {})
        return given(*args, env_options_overrides=overrides, **more)

    if _CHOOSES_FUSION:
        monkeypatch.setattr(compiler, "get_compile_options", options_of_users)
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    jax.clear_caches()  # also for single ops
    yield
    jax.config.update(name, before)
    jax.clear_caches()


@pytest.fixture
def uncached() -> Iterator[None]:
    """Compiles again: our partitioning rules do not run for a program from JAX's persistent cache,
    and on CPU such a program cannot be serialized again.
    """
    name = "jax_enable_compilation_cache"
    before = jax.config.jax_enable_compilation_cache
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    yield
    jax.config.update(name, before)
    compilation_cache.reset_cache()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ways]:
    """Lets a test choose the way of `ep.moe` for the programs that it traces."""
    from block_ways import Ways

    made = Ways(monkeypatch)
    yield made
    made.as_users()


@pytest.fixture(params=["xla", "memfd", *on_nodes(1, 2, 4)])
def transport(request: pytest.FixtureRequest) -> str:
    """All transports that run on CPU."""
    return str(request.param)


@pytest.fixture
def make_group() -> Iterator[fakes.MakeGroup]:
    """Like `fakes.local_group`, but closes the groups after the test.

    transport="memfd/2" is "memfd" on nodes of 2 ranks, or of 1 where that does not divide.
    """
    groups: list[fakes.LocalGroup] = []

    def make(**settings: Any) -> fakes.LocalGroup:
        transport, _, size = settings.get("transport", "xla").partition("/")
        if size:
            settings |= {"transport": transport, "node_size": int(size)}
        groups.append(fakes.local_group(**settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()

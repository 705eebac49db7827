"""Metrics that Prometheus reads from a daemon: names, labels, values, counts and speed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest
from file_driver import UUIDS, FileDriver
from harness import Running, Turns
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from raw_client import WAIT_S, make_spec
from tally_writer import Tally
from written_group import Group

from ep_runtime import layer_specs, wire
from ep_runtime.board_abi import HandleState, OpCode, RankState
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client import cli
from ep_runtime_server import config as server_config
from ep_runtime_server import runtime
from ep_runtime_server.daemon import Daemon
from ep_runtime_server.memory.cuda_device import Gpus
from ep_runtime_server.metrics import collector, endpoint
from ep_runtime_server.metrics.catalogue import COUNTER, HISTOGRAM, METRICS, SERIES_OF_HISTOGRAM
from ep_runtime_server.metrics.exposition import encode
from ep_runtime_server.nodes.config import Endpoint

PREFIX = "ep_runtime_"
HOLD_S = 0.04  # time of the loop's thread; text of a large job takes twice as long


class Metered(Running):
    """A daemon with a metrics endpoint, and helpers that read it."""

    def __init__(self, loop, directory, daemon) -> None:
        super().__init__(loop, directory, daemon, None)
        self.loop = loop
        self.runtime = daemon.runtime
        self.address = daemon.metrics.address
        self.url = f"http://{self.address}/metrics"

    def text(self, accept: str = "") -> str:
        request = urllib.request.Request(self.url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.read().decode()

    def values(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Returns a metric's values with those labels, by the values of its other labels, sorted by
        name.
        """
        return {
            tuple(value for key, value in sorted(sample.labels.items()) if key not in labels): (
                sample.value
            )
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
            if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
        }

    def value(self, name: str, **labels: str) -> float:
        (found,) = self.values(name, **labels).values()
        return found

    def collect(self, *, detail: bool):
        made = collector.Collector(self.runtime, detail=detail).collect()
        return asyncio.run_coroutine_threadsafe(made, self.loop).result(WAIT_S)


@pytest.fixture(scope="module")
def metered(server_loop, tmp_path_factory):
    driver = FileDriver(gpu_bytes=1 << 30)
    settings = server_config.ServerConfig(
        directory=tmp_path_factory.mktemp("d"),
        max_host_bytes=256 << 20,
        metrics=Endpoint("127.0.0.1", 0),
        metrics_detail=True,
    )

    async def start() -> Daemon:
        daemon = Daemon(settings, gpus=Gpus(load=lambda: driver))
        await daemon.start()
        return daemon

    daemon = asyncio.run_coroutine_threadsafe(start(), server_loop).result(WAIT_S)
    running = Metered(server_loop, settings.directory, daemon)
    yield running
    running.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((running.address.host, running.address.port), WAIT_S)


@pytest.fixture(scope="module")
def job(metered):
    """Two ranks on GPUs: layer "a" with two handles and "b" with one, each called a few times."""
    client = metered.client(job="job")
    named = [layer_specs.LayerSpec("a", top_k=2, in_flight=2), layer_specs.LayerSpec("b", top_k=1)]
    group = Group(client, make_spec(transport="nvlink"), layers=named)
    now_ns = time.monotonic_ns()
    for index, calls in enumerate((3, 4, 5)):
        group.handle(index, calls=calls, rounds=index, state=HandleState.OPEN, updated_ns=now_ns)
        group.rows(0, index, 10 * calls)
        group.rows(1, index, 30 * calls, dropped_rows=index)
    for rank, rows in enumerate((120, 360)):
        group.rank(rank, calls=12, rows=rows, dropped_rows=3 * rank, op=OpCode.COMBINE)
    group.rank(0, progress_ns=now_ns)
    for rank, calls in enumerate((2, 3)):
        _tally_combines(Tally(group.map, group.spec, rank), rank, calls)
    yield group
    group.close()


def _tally_combines(tally: Tally, rank: int, calls: int) -> None:
    op = tally.op(OpCode.COMBINE)
    op.calls, op.time_ns, op.wait_ns = calls, 4_000_000, 500_000 * rank
    op.times[0], op.times[8], op.waits[0] = 1, calls - 1, calls
    for peer in range(2):
        tally.peer(OpCode.COMBINE, peer).wait_ns = 250_000 * rank
    load, rows = tally.load(1)
    load.tokens, rows[1] = 64, 30 * rank


def test_every_metric_is_exported_and_nothing_else(metered, job) -> None:
    families = {family.name: family for family in text_string_to_metric_families(metered.text())}
    # Like the newer format, the parser keeps _total for the samples of a counter.
    expected = {metric.full_name.removesuffix("_total"): metric for metric in METRICS.values()}
    assert {name for name in families if not name.startswith("process_")} == set(expected)
    assert "process_start_time_seconds" in families
    for name, metric in expected.items():
        assert families[name].type == metric.kind
        assert families[name].documentation == metric.help
        for sample in families[name].samples:
            ending = sample.name.removeprefix(metric.full_name)
            wanted = ("_bucket", "_count", "_sum") if metric.kind == HISTOGRAM else ("",)
            assert ending in wanted
            bounds = {"le"} if ending == "_bucket" else set()
            assert set(sample.labels) == {*metric.labels, *bounds}


def test_both_formats_say_the_same(metered, job) -> None:
    newer = metered.text("application/openmetrics-text; version=1.0.0")
    found = {family.name: family for family in openmetrics.text_string_to_metric_families(newer)}
    assert found["ep_runtime_calls"].type == "counter"
    assert [sample.value for sample in found["ep_runtime_calls"].samples] == [7.0, 5.0]


def test_names_follow_the_conventions() -> None:
    units = ("_seconds", "_bytes", "_rows", "_ratio", "_info")
    for metric in METRICS.values():
        assert re.fullmatch(r"ep_runtime_[a-z][a-z0-9_]*[a-z0-9]", metric.full_name)
        assert metric.full_name.endswith("_total") == (metric.kind == COUNTER)
        base = metric.full_name.removesuffix("_total")
        assert not re.search(r"_(ms|us|ns|s|kb|mb|gib|mib|percent|count|sum|bucket)$", base)
        # A unit is only at the end of a name.
        assert not [unit for unit in units if unit in base and not base.endswith(unit)]
        assert metric.labels[0] == "node"
        assert not {"le", "quantile", "instance", "pid"} & set(metric.labels)
        assert all(re.fullmatch("[a-z_]+", label) for label in metric.labels)
        assert metric.help
        assert not metric.help.endswith(".")


def test_counters_are_what_handles_says(metered, job, capsys) -> None:
    where = f"unix://{metered.directory}"
    assert cli.main(["handles", "-o", "json", "--address", where]) == 0
    handles = json.loads(capsys.readouterr().out)["items"]
    assert len(handles) == 3
    for name, field in [
        ("calls_total", "calls"),
        ("rows_total", "rows"),
        ("dropped_rows_total", "dropped_rows"),
        ("rounds_total", "rounds"),
    ]:
        for layer in ("a", "b"):
            said = sum(item[field] for item in handles if item["layer"] == layer)
            assert metered.value(name, layer=layer) == said
    assert metered.value("rows_total", layer="a") == 40 * 3 + 40 * 4
    assert metered.value("dropped_rows_total", layer="b") == 2
    assert metered.value("rounds_total", layer="b") == 2


def test_labels_say_whose_it_is(metered, job) -> None:
    owner = {"uid": str(os.getuid()), "job": "job", "group": "moe", "node": socket.gethostname()}
    assert metered.value("calls_total", layer="b", **owner) == 5
    assert metered.value("rank_rows_total", rank="1", **owner) == 360
    gpus = dict(zip(UUIDS, ("5", ""), strict=True))
    for rank, uuid in enumerate(UUIDS):
        told = {"rank": str(rank), "device": uuid, "gpu": gpus[uuid]}
        assert metered.value("rank_gpu_info", **told, **owner) == 1
    assert metered.value("group_info", transport="nvlink", on_overflow="drop", **owner) == 1
    assert metered.value("group_windows_bytes", **owner) == sum(
        metered.values("windows_bytes", state="LEASED").values()
    )


def test_load_is_the_fullest_rank_over_the_mean(metered, job) -> None:
    assert metered.value("group_load_max_mean_ratio") == pytest.approx(1.5)
    assert metered.value("layer_load_max_mean_ratio", layer="a") == pytest.approx(1.5)
    assert metered.value("layer_rank_rows_total", layer="a", rank="1") == 210
    assert metered.value("layer_rank_dropped_rows_total", layer="b", rank="1") == 2


def test_calls_are_histograms_of_time_and_wait(metered, job) -> None:
    of = {"job": "job", "op": "COMBINE"}
    owner = {"uid": str(os.getuid()), "group": "moe", "node": socket.gethostname()}
    found = metered.values("op_seconds_bucket", **of, **owner)
    buckets = {float(le): value for (le,), value in found.items()}
    assert buckets[float("inf")] == metered.value("op_seconds_count", **of) == 5
    assert buckets[4.096e-06] == 2  # of both ranks
    assert buckets[0.000262144] == 2
    assert buckets[0.001048576] == 5
    assert len(buckets) == 13
    assert metered.value("op_seconds_sum", **of) == pytest.approx(0.008)
    assert metered.value("op_wait_seconds_sum", **of) == pytest.approx(0.0005)
    assert metered.value("rank_waited_seconds_total", job="job", rank="1") == pytest.approx(0.0005)
    assert metered.value("peer_waited_seconds_total", job="job", rank="0") == pytest.approx(0.00025)


def test_experts_are_told_where_detail_is_asked_for(metered, job) -> None:
    second = str(job.spec.experts_per_rank + 1)  # the second one of rank 1
    assert metered.value("tokens_total", job="job", layer="a") == 128
    assert metered.value("expert_rows_total", job="job", layer="a", expert=second) == 30
    experts = job.spec.num_experts
    assert metered.value("layer_expert_load_max_mean_ratio", job="job", layer="a") == pytest.approx(
        experts
    )
    assert len(metered.values("expert_rows_total", job="job")) == 2 * experts


def test_what_is_counted_as_status_counts_it(metered, job) -> None:
    status = metered.status()
    assert metered.value("handles") == status.num_handles == 3
    assert metered.value("layers") == status.num_layers == 2
    assert metered.value("groups", state="READY") == status.num_groups == 1
    # Not the connection that `status` opens.
    assert metered.value("sessions", state="ACTIVE") == 1
    (user,), most = status.users, status.user_limits
    for what in ("groups", "layers", "host_bytes", "journal_bytes"):
        name = what if what.endswith("bytes") else f"num_{what}"
        used = metered.value("user_used", what=what, uid=str(os.getuid()))
        assert used == getattr(user, name) > 0
        limit = metered.value("user_limit", what=what)
        assert limit == getattr(most, f"max_{what}")
    pools = {pool.device: pool.leased_bytes for pool in status.pools}
    leased = metered.values("windows_bytes", state="LEASED")
    assert {device: value for (device, _), value in leased.items()} == pools
    assert (
        metered.values("group_handles") == {} or metered.value("group_handles", state="OPEN") == 3
    )


def test_who_waits_for_whom_and_for_how_long(metered) -> None:
    client = metered.client(job="waits")
    group = Group(client, make_spec(ranks=4), layers=[layer_specs.LayerSpec("moe/0", top_k=2)])
    (layer,), _ = client.register(group.made, [layer_specs.LayerSpec("moe/0", top_k=2)])
    try:
        for rank, waiting_for, for_s in [(0, 1, 3), (2, 3, 20)]:
            then_ns = max(1, time.monotonic_ns() - for_s * 10**9)
            state = {"state": RankState.WAITING, "op": OpCode.COMBINE, "since_ns": then_ns}
            group.rank(rank, waiting_for=waiting_for, layer_id=layer.base_id, **state)
        waits = metered.values("rank_wait_seconds", job="waits")
        assert [x >= 3 for x in waits.values()] == [True, False, True, False]
        assert [x >= 20 for x in waits.values()] == [False, False, True, False]
        assert list(metered.values("peer_waiters", job="waits").values()) == [0, 1, 0, 1]
        assert metered.value("peer_wait_seconds", job="waits", rank="1") >= 3
        (late,) = metered.values("late_rank_seconds", job="waits", layer="moe/0", rank="3").values()
        assert late >= 20
        assert len(metered.values("late_rank_seconds", job="waits")) == 1
        now = {"state": "WAITING", "op": "COMBINE"}
        assert len(metered.values("rank_state", job="waits", **now)) == 2
        group.rank(1, state=99)  # nothing is known of it, as of another node's
        assert metered.values("rank_calls_total", job="waits", rank="1") == {}
        assert metered.value("peer_waiters", job="waits", rank="1") == 1
    finally:
        group.close()


def test_a_group_that_is_gone_has_no_series(metered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "check_new_name", lambda kind, name: None)  # as in journals
    client = metered.client(job='"short", \\n')
    group = Group(client, make_spec("short"), layers=[layer_specs.LayerSpec("l", top_k=1)])
    assert metered.values("calls_total", job='"short", \\n')
    group.close()
    assert "short" not in metered.text()


def test_a_board_that_a_client_wrecked_does_not_hurt(metered) -> None:
    client = metered.client(job="wreck")
    group = Group(client, make_spec("wreck"), layers=[layer_specs.LayerSpec("l", top_k=1)])
    try:
        for byte in (b"\xff", b"\x7f"):
            group.map[:] = byte * len(group.map)
            assert metered.value("calls_total", job="wreck") == 0
            assert metered.values("rank_calls_total", job="wreck") == {}
    finally:
        group.close()


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/", "GET", 404), ("/metrics", "POST", 405)]
)
def test_nothing_else_is_served(metered, path, method, status) -> None:
    url = metered.url.removesuffix("/metrics") + path
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=WAIT_S)
    with caught.value as answer:
        assert answer.status == status


@pytest.mark.parametrize("sent", [b"x" * 20_000, b"\xff\r\n\r\n", b"GET /met", b""])
def test_rude_callers_get_no_turn_of_others(metered, sent) -> None:
    where = (metered.address.host, metered.address.port)
    with socket.create_connection(where, WAIT_S) as rude:
        rude.sendall(sent)
        assert metered.value("healthy") == 1
    assert "task.failed" not in metered.event_kinds()


def test_who_sends_no_request_is_let_go(metered, monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_S", 0.05)
    where = (metered.address.host, metered.address.port)
    with socket.create_connection(where, WAIT_S) as slow, contextlib.suppress(ConnectionResetError):
        slow.sendall(b"GET ")
        assert slow.recv(1) == b""


def test_connections_are_bounded(metered, monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_S", 60.0)
    where = (metered.address.host, metered.address.port)
    with contextlib.ExitStack() as open_ones:
        held = [socket.create_connection(where, WAIT_S) for _ in range(16)]
        for connection in held:
            open_ones.enter_context(connection)
            connection.sendall(b"GET ")
        one_more = open_ones.enter_context(socket.create_connection(where, WAIT_S))
        with contextlib.suppress(ConnectionResetError):
            assert one_more.recv(1) == b""
    assert metered.value("healthy") == 1


def test_it_says_where_it_is(metered) -> None:
    (event,) = [e for e in metered.ask("ListEvents").events if e.kind == "server.metrics"]
    assert json.loads(event.fields_json)["address"] == metered.url


@pytest.fixture(scope="module")
def large(metered):
    """64 ranks, 256 experts, a stack of 60 layers, every counter in use."""
    client = metered.client(job="large")
    axes = {"mesh_axes": (("dp", 2), ("ep", 32)), "outer_axes": "dp"}
    spec = make_spec("large", num_experts=256, transport="nvlink", **axes)
    stack = wire.LayerStackSpec(layer_specs.LayerSpec("s", top_k=2), 60)
    group = Group(client, spec, stacks=[stack])
    for layer in range(60):
        group.handle(layer, calls=1, updated_ns=1)
        for rank in range(64):
            group.rows(rank, layer, 1 + rank)
    for rank in range(64):
        group.rank(rank, rows=1 + rank, progress_ns=1)
        _tally_once(Tally(group.map, spec, rank))
    yield group
    group.close()


def _tally_once(tally: Tally) -> None:
    for op in range(OpCode.PREPARE, OpCode.COMBINE_BWD + 1):
        tally.op(OpCode(op)).calls = 1
    for layer in range(60):
        load, rows = tally.load(layer)
        load.tokens, rows[0] = 1, 1


def of_job(sheet, name: str) -> int:
    """Counts a job's series in the output of a collector."""
    return sum(
        SERIES_OF_HISTOGRAM if METRICS[metric].kind == HISTOGRAM else 1
        for metric, rows in sheet.rows.items()
        if "job" in METRICS[metric].labels
        for labels, _ in rows
        if labels[METRICS[metric].labels.index("job")] == name
    )


def test_series_of_a_large_job_are_few_and_detail_is_asked_for(metered, large) -> None:
    plain, detail = metered.collect(detail=False), metered.collect(detail=True)
    # 19 of the group, 15 of each histogram of an op, 12 of a rank, 8 of a layer.
    assert of_job(plain, "large") == 19 + 5 * 2 * 15 + 64 * 12 + 60 * 8 == 1417
    assert of_job(detail, "large") == of_job(plain, "large") + 2 * 64 * 60 + 256 * 60 == 24457
    assert b"layer_rank_rows_total" not in encode(plain, "", detail=False)[0]


def test_a_scrape_of_a_large_job_is_short_and_holds_nobody(metered, large, server_loop) -> None:
    with Turns(server_loop) as turns:
        text = metered.text()
    assert text.count('job="large"') > 24000
    assert turns.worst_s < HOLD_S
    assert metered.value("metrics_collection_seconds") < 1.0


def test_one_user_cannot_fill_the_answer(metered, large, monkeypatch) -> None:
    assert list(metered.values("metrics_left_out").values()) == [0, 0]
    monkeypatch.setattr(collector, "MAX_SERIES_PER_USER", 1500)
    left = metered.collect(detail=True)
    assert of_job(left, "large") <= 1500
    assert dict(left.rows["metrics_left_out"])[socket.gethostname(), "layers"] >= 58
    monkeypatch.setattr(collector, "MAX_SERIES_PER_USER", 100)
    left = metered.collect(detail=True)
    assert of_job(left, "large") == 0
    assert dict(left.rows["metrics_left_out"])[socket.gethostname(), "groups"] >= 1


def test_a_free_port_is_printed_and_a_taken_one_is_an_error(daemon_process) -> None:
    first = daemon_process("--metrics", "0")
    address = first.ready["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        assert answer.status == 200
    second = daemon_process("--metrics", address, ready=False)
    code, told = second.ended()
    assert code == 2
    assert f"--metrics cannot listen on {address}: Address already in use" in told
    first.popen.send_signal(signal.SIGTERM)
    code, log = first.ended()
    assert code == 0
    assert f"metrics at http://{address}/metrics" in log


def test_without_the_extra_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match=r"ep-runtime\[metrics\]"):
        server_config.parse_metrics("0")


@pytest.mark.parametrize(
    ("text", "said"),
    [("9470", "127.0.0.1:9470"), (":1", "127.0.0.1:1"), ("[::1]:0", "[::1]:0"), ("h:1", "h:1")],
)
def test_an_address_is_on_loopback_unless_it_says_otherwise(text, said) -> None:
    assert str(server_config.parse_metrics(text)) == said


def test_no_address_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="--metrics must be HOST:PORT"):
        server_config.parse_metrics("localhost")

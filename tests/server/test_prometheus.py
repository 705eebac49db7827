"""A real Prometheus scrapes daemons while jobs run: every query of the dashboard and of the alert
rules finds data. The tests are skipped if Prometheus is not installed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import grafana_files
import pytest
from cluster_places import PORT, loopback, make_certificates, tls_flags
from file_driver import FileDriver
from harness import Running, Served, eventually
from ranked_job import Job
from raw_client import make_spec
from tally_writer import Tally
from written_group import Group

import ep_runtime as ep
from ep_runtime import layer_specs
from ep_runtime.board_abi import OpCode, RankState
from ep_runtime_server.memory.cuda_device import Gpus
from ep_runtime_server.nodes.config import Endpoint

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed"
)

LIMIT_S = 60.0  # another project's program, on a machine with other load


class Prometheus:
    """Prometheus on a free port, which scrapes once a second."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        """`targets`: node names by address, as if each were on a separate machine."""
        names = [
            {
                "source_labels": ["instance", "node"],
                "regex": f"{re.escape(address)};.+",
                "target_label": "node",
                "replacement": node,
            }
            for address, node in targets.items()
        ]
        scraped = {
            "job_name": "ep-runtime",
            "honor_labels": True,
            "static_configs": [{"targets": [*targets]}],
            "metric_relabel_configs": names,
        }
        every = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(
                {
                    "global": {**every, "evaluation_interval": "1s"},
                    "rule_files": [str(grafana_files.FOLDER / "alerts.yml")],
                    "scrape_configs": [scraped],
                }
            )
        )
        self._log = folder / "prometheus.log"
        words = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                ["prometheus", *words, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log
            )
        self._url = ""

    def start(self) -> None:
        """Starts it; returns once it serves."""

        def listens() -> bool:
            said = self._log.read_text()
            assert self._popen.poll() is None, said
            found = re.search(r'msg="Listening on" address=(\S+)', said)
            self._url = f"http://{found[1]}" if found else ""
            return found is not None and "Server is ready" in said

        eventually(listens, within_s=LIMIT_S, what="Prometheus listens")

    def ask(self, path: str, **fields: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return json.load(answer)["data"]

    def finds(self, expression: str) -> bool:
        """Whether the query finds a number."""
        found = self.ask("query", query=expression)["result"]
        return any(not math.isnan(float(series["value"][1])) for series in found)

    def stop(self) -> None:
        self._popen.terminate()
        try:
            assert self._popen.wait(LIMIT_S) == 0, self._log.read_text()
        finally:
            self._popen.kill()
            self._popen.wait(LIMIT_S)


class Written:
    """A group on fake GPUs; its numbers grow like a job's, and rank 1 is late."""

    def __init__(self, daemon: Running) -> None:
        client, layer = daemon.client(job="written"), layer_specs.LayerSpec("layer", top_k=2)
        self._group = Group(client, make_spec(transport="nvlink"), layers=[layer])
        (registered,), _ = client.register(self._group.made, [layer])
        since_ns = max(1, time.monotonic_ns() - 60 * 10**9)
        waits = {"state": RankState.WAITING, "op": OpCode.COMBINE, "waiting_for": 1}
        self._group.rank(0, layer_id=registered.base_id, since_ns=since_ns, **waits)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        self._group.handle(0, calls=self._steps, rounds=self._steps, updated_ns=1)
        for rank in range(2):
            counts = {"rows": (1 + rank) * self._steps, "dropped_rows": self._steps}
            self._group.rows(rank, 0, **counts)
            self._group.rank(rank, calls=self._steps, **counts)
            load, rows = Tally(self._group.map, self._group.spec, rank).load(0)
            load.tokens, rows[0] = 8 * self._steps, counts["rows"]

    def close(self) -> None:
        self._group.close()


@pytest.fixture
def gpus(start_daemon):
    """A daemon with files as GPU memory."""
    driver = FileDriver(gpu_bytes=1 << 30)
    return start_daemon(
        gpus=Gpus(load=lambda: driver), metrics=Endpoint("127.0.0.1", 0), metrics_detail=True
    )


@pytest.fixture
def serving(daemon_process, tmp_path):
    """`serve --metrics` as users start it, for a cluster whose certificates end in two days."""
    host = loopback()
    tls = tls_flags(make_certificates(tmp_path / "pki", a=host), "a")
    cluster = ("--coordinator", f"{host}:{PORT}", "--node", "a", *tls)
    return daemon_process("--metrics", "127.0.0.1:0", "--metrics-detail", *cluster)


def metrics_address(daemon: Served) -> str:
    (event,) = [e for e in daemon.ask("ListEvents").events if e.kind == "server.metrics"]
    return urllib.parse.urlparse(json.loads(event.fields_json)["address"]).netloc


@pytest.fixture
def prometheus(gpus, serving, tmp_path):
    targets = {metrics_address(serving): "hosts", metrics_address(gpus): "gpus"}
    running = Prometheus(tmp_path, targets)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def jobs(gpus, serving):
    """Two jobs: one moves rows through host memory, the other's boards are written by the test."""
    with ep.connect(f"unix://{serving.directory}", job="tests", timeout_s=LIMIT_S) as session:
        job, written = Job(session), Written(gpus)
        try:
            yield written
        finally:
            job.stop()
            written.close()


def numbers(text: str) -> str:
    """Returns the expression that a rule compares, because its condition may be false now."""
    return re.sub(r" (==|>|<) [\d.* ]+$", "", text)


def test_every_query_finds_data(prometheus, jobs) -> None:
    without = [(title, numbers(text)) for title, text in grafana_files.expressions()]

    def all_found() -> bool:
        jobs.step()
        without[:] = [(title, text) for title, text in without if not prometheus.finds(text)]
        return not without

    try:
        eventually(all_found, within_s=LIMIT_S)
    except AssertionError:
        pytest.fail(f"no data: {without}")


def test_rules_are_taken_and_one_fires(prometheus, jobs) -> None:
    def firing() -> list[Any]:
        return [x for x in prometheus.ask("alerts")["alerts"] if x["state"] == "firing"]

    eventually(lambda: len(firing()) >= 2, within_s=LIMIT_S, what="alerts")
    ends, late = sorted(firing(), key=lambda alert: alert["labels"]["alertname"])
    assert ends["labels"]["alertname"] == "EpRuntimeCertificateEnds"
    assert re.fullmatch(r".*/a\.pem on hosts ends in 1d 2\dh .*", ends["annotations"]["summary"])
    assert late["labels"]["alertname"] == "EpRuntimeRankLate"
    assert late["labels"]["uid"] == str(os.getuid())
    assert late["annotations"]["summary"] == "Rank 1 of written/moe holds up the others"
    assert re.fullmatch(
        r"They wait in COMBINE of layer layer for \dm \d+s\.", late["annotations"]["description"]
    )
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(grafana_files.RULES)
    assert {rule["health"] for rule in rules} == {"ok"}


def test_variables_have_values(prometheus, jobs) -> None:
    for variable in grafana_files.VARIABLES[1:]:
        selector, label = re.fullmatch(
            r"label_values\((.*), (\w+)\)", variable["definition"]
        ).groups()
        selector = re.sub(r'"\$(\w+)"', '".*"', selector)

        def values(selector: str = selector, label: str = label) -> list[str]:
            return prometheus.ask(f"label/{label}/values", **{"match[]": selector})

        eventually(lambda: len(values()) >= 1, within_s=LIMIT_S, what=variable["definition"])


def test_promtool_takes_rules_and_text(gpus, jobs) -> None:
    rules = [*("promtool", "check", "rules"), grafana_files.FOLDER / "alerts.yml"]
    subprocess.run(rules, check=True, timeout=LIMIT_S)
    with urllib.request.urlopen(f"http://{metrics_address(gpus)}/metrics", timeout=LIMIT_S) as text:
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text.read(),
            capture_output=True,
            timeout=LIMIT_S,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

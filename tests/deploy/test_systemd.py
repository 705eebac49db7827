"""Tests the systemd units: warnings of systemd, and the units at run time.

The second part boots a systemd (`booted_systemd`), for the node's unit and for a user's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import booted_systemd
import doc_pages
import pytest
from child_programs import run_to_end
from harness import eventually

FOLDER = doc_pages.ROOT / "docs/deploy/systemd"
NODE_UNIT = FOLDER / "ep-runtime.service"
USER_UNIT = FOLDER / "user/ep-runtime.service"
USER = 65534
RESTART_S = 20.0

# A client that leaves a group with memory behind, and a later client that looks for it.
_CLIENT = """
import os
import sys
from pathlib import Path
from raw_client import Client, make_spec
client = Client(Path(sys.argv[1]))
answer = client.create(make_spec(retain_s=300.0))
print(int(answer.reattached))
sys.stdout.flush()
client.fetch(answer.group)
client.attached(answer.group)
import os; os._exit(0)
"""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", [NODE_UNIT, USER_UNIT], ids=["node", "user"])
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    # systemd also checks that the program exists, which is elsewhere here.
    text = unit.read_text(encoding="utf-8")
    program = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    copy = tmp_path / unit.name
    copy.write_text(text.replace(program.split()[0], f"ExecStart={sys.executable}"))
    who = "--user" if unit == USER_UNIT else "--system"
    words = ("systemd-analyze", who, "--man=no", "--recursive-errors=no", "verify", copy)
    env = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    assert run_to_end(*words, env=env).stderr == ""


@pytest.fixture(scope="module")
def system() -> Iterator[booted_systemd.System]:
    why = booted_systemd.why_not()
    if why is not None:
        pytest.skip(why)
    booted = booted_systemd.boot()
    yield booted
    booted.close()


def leave_memory(system: booted_systemd.System, directory: str) -> bool:
    """A client of the user comes and goes; whether it found the group that the last one left."""
    words = (sys.executable, "-c", _CLIENT, directory)
    done = system.run(*words, user=USER, PYTHONPATH=os.environ["PYTHONPATH"])
    return bool(int(done.stdout))


def test_the_nodes_daemon_keeps_memory_that_nobody_maps(system: booted_systemd.System) -> None:
    system.write("/usr/lib/sysusers.d/ep-runtime.conf", (FOLDER / "sysusers.conf").read_text())
    system.run("systemd-sysusers")
    uid = system.run("id", "-u", "ep-runtime").stdout.strip()
    system.write("/etc/systemd/system/ep-runtime.service", NODE_UNIT.read_text())
    if str(doc_pages.ROOT).startswith("/tmp/"):  # or systemd would hide the program from itself
        drop_in = "/etc/systemd/system/ep-runtime.service.d/checkout.conf"
        system.write(drop_in, "[Service]\nPrivateTmp=no\n")
    system.write("/etc/ep-runtime/serve.toml", f"allow-uid = [{USER}]\ndrain-s = 0\n")
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "start", "ep-runtime")  # returns when the daemon serves
    assert not leave_memory(system, "/run/ep-runtime")
    assert system.show("ep-runtime", "NFileDescriptorStore") == "3"

    def told() -> dict[str, object]:
        address = f"unix:///run/ep-runtime?uid={uid}"
        done = system.run(
            *("/opt/ep-runtime/bin/ep-runtime", "groups", "-o", "json", "--address", address),
            user=USER,
        )
        (group,) = json.loads(done.stdout)["items"]
        return {name: group[name] for name in ("uid", "state")}

    eventually(lambda: told() == {"uid": USER, "state": "RETAINED"}, within_s=RESTART_S)
    before = system.show("ep-runtime", "MainPID")
    system.run("systemctl", "reload", "ep-runtime")
    assert leave_memory(system, "/run/ep-runtime")
    assert system.show("ep-runtime", "MainPID") == before
    for order in (["kill", "--signal=KILL"], ["restart"]):
        before = system.show("ep-runtime", "MainPID")
        system.run("systemctl", *order, "ep-runtime")

        def is_new(before: str = before) -> bool:
            now = system.show("ep-runtime", "MainPID"), system.show("ep-runtime", "ActiveState")
            return now[0] != before and now[1] == "active"

        eventually(is_new, within_s=RESTART_S)
        assert system.show("ep-runtime", "NFileDescriptorStore") == "3"
        assert leave_memory(system, "/run/ep-runtime"), order
    system.run("/opt/ep-runtime/bin/ep-runtime", "drain", "--shutdown", "--yes", "--address",
               f"unix:///run/ep-runtime?uid={uid}")  # fmt: skip
    eventually(lambda: system.show("ep-runtime", "ActiveState") == "inactive", within_s=RESTART_S)
    assert system.show("ep-runtime", "Result") == "success"
    assert not (system.root / "run/ep-runtime").exists()


def test_a_users_daemon_is_the_one_that_his_processes_look_for(
    system: booted_systemd.System,
) -> None:
    home = "/run/home"
    system.write(f"{home}/.local/bin/ep-runtime", booted_systemd.program_text(), 0o755)
    system.write(f"{home}/.config/systemd/user/ep-runtime.service", USER_UNIT.read_text())
    runtime = {"XDG_RUNTIME_DIR": "/run/manager", "HOME": home}
    # user@.service without PAM and without logind.
    system.run(
        *("systemd-run", "--unit=manager", f"--uid={USER}", "--property=Type=notify"),
        *("--property=Delegate=yes", "--property=RuntimeDirectory=manager"),
        *(f"--setenv={name}={value}" for name, value in runtime.items()),
        *(str(booted_systemd.SYSTEMD), "--user", "--unit=ep-runtime.service"),
    )

    def state(name: str) -> str:
        done = system.run(
            *("systemctl", "--user", "show", "--value", f"--property={name}", "ep-runtime"),
            user=USER,
            **runtime,
        )
        return done.stdout.strip()

    def serves() -> bool:
        done = system.run(
            "/opt/ep-runtime/bin/ep-runtime", "status", "--ready", user=USER, check=False, **runtime
        )
        return done.returncode == 0

    eventually(serves, within_s=RESTART_S)
    assert not leave_memory(system, "/run/manager/ep-runtime")
    assert state("NFileDescriptorStore") == "3"
    before = state("MainPID")
    system.run("systemctl", "--user", "kill", "--signal=KILL", "ep-runtime", user=USER, **runtime)
    eventually(lambda: state("MainPID") != before and serves(), within_s=RESTART_S)
    assert leave_memory(system, "/run/manager/ep-runtime")

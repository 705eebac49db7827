"""Boots systemd as process 1 in its own namespaces, over a copy of this machine's files.

What it starts, and what is written below its root, is gone with it; nothing outside changes. It
takes root, overlayfs, cgroup2, and systemd itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import guardian
from child_programs import run_to_end
from harness import eventually

BOOT_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 240.0
SYSTEMD = Path("/lib/systemd/systemd")
_UMASK = 0o022  # the path of the system's programs, whatever path this process has
_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

# Prepares a system as a container's manager does. $1 is an empty folder; $2... are folders on other
# file systems that the system needs.
_BOOT = r"""
set -euo pipefail
base=$1; shift
mount -t tmpfs tmpfs "$base"
mkdir "$base/root"
layers=0
copy() {  # FOLDER PLACE: what is written there stays there
  layers=$((layers + 1))
  mkdir -p "$base/up$layers" "$base/work$layers" "$2"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$base/up$layers,workdir=$base/work$layers" "$2"
}
copy / "$base/root"
cd "$base/root"
for folder in "$@"; do copy "$folder" ".$folder"; done
mount -t proc proc proc
mount -t tmpfs tmpfs run
chmod 1777 tmp
mount -t tmpfs tmpfs dev
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for device in null zero full random urandom tty; do
  touch "dev/$device"; mount --bind "/dev/$device" "dev/$device"
done
touch dev/console "$base/console"
mount --bind "$base/console" dev/console
ln -s /proc/self/fd dev/fd
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
mkdir -p run/systemd/system
printf '[Unit]\nDefaultDependencies=no\n' > run/systemd/system/nothing.target
# It would empty /tmp, where a checkout may be.
ln -s /dev/null run/systemd/system/systemd-tmpfiles-setup.service
mkdir old
pivot_root . old
umount -l old
export container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec /lib/systemd/systemd --system --unit=nothing.target --log-target=console --show-status=no \
  < /dev/null
"""


def why_not() -> str | None:
    """Returns what this machine lacks, or None."""
    if os.geteuid() != 0:
        return "only root boots a system"
    if not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "systemd or unshare is not installed"
    if _cgroups() is None:
        return "no cgroup2 here"
    script = (
        "d=$(mktemp -d) && mount -t tmpfs t $d && cd $d && mkdir u w r && "
        "mount -t overlay o -o lowerdir=/,upperdir=u,workdir=w r; s=$?; cd /; umount -l $d; "
        "rmdir $d; exit $s"
    )
    words = ("unshare", "--pid", "--fork", "--mount", "--cgroup", "sh", "-c", script)
    tried = run_to_end(*words, code=None, limit_s=BOOT_TIMEOUT_S)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def _cgroups() -> Path | None:
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class System:
    """A booted system; `root` is its root folder as seen from outside.

    Attributes:
        folders: what its programs read, wherever it lies.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        cgroups = _cgroups()
        assert cgroups is not None
        self._group = cgroups / f"ep-test-{os.getpid()}"
        self._group.mkdir()
        self._group.chmod(0o777 & ~_UMASK)  # user managers read it
        self._base = Path(tempfile.mkdtemp(prefix="ept-"))
        here = os.stat("/").st_dev
        elsewhere = [str(folder) for folder in folders if os.stat(folder).st_dev != here]
        enter = f'echo $$ > {self._group}/cgroup.procs; exec "$@"'
        self._unshare = subprocess.Popen(
            ["sh", "-c", enter, "sh",
             "unshare", "--pid", "--fork", "--kill-child", "--mount", "--cgroup", "--net", "--uts",
             "--ipc",
             "bash", "-c", _BOOT, "boot", str(self._base), *elsewhere],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=_UMASK,
        )  # fmt: skip
        guardian.protect(self._unshare.pid)
        try:
            self._init = self._wait_for_init()
            self.root = Path(f"/proc/{self._init}/root")
            for folder in folders:  # users of the system read files that only root may read here
                for path in (folder, *folder.parents):
                    inside = self.root / path.relative_to("/")
                    inside.chmod(inside.stat().st_mode | 0o055)
        except BaseException:
            self.close()
            raise

    def _wait_for_init(self) -> int:
        eventually(self._is_up, within_s=BOOT_TIMEOUT_S, what="systemd is up")
        return self._init

    def _is_up(self) -> bool:
        if self._unshare.poll() is not None:
            assert self._unshare.stdout is not None
            raise AssertionError(f"no system booted: {self._unshare.stdout.read()}")
        pid = self._unshare.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        if not found or Path(f"/proc/{found[0]}/comm").read_text(encoding="utf-8") != "systemd\n":
            return False
        self._init = int(found[0])
        return self.run("systemctl", "is-system-running", check=False).returncode == 0

    def run(
        self, *words: str, check: bool = True, user: int | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the system, as root or as that user."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        done = subprocess.run(
            self._entering(*become, *words),
            env=_PATH | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            umask=_UMASK,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a command in the system as root; the caller ends it."""
        started = subprocess.Popen(
            self._entering(*words), env=_PATH | variables, stdin=subprocess.DEVNULL, umask=_UMASK
        )
        guardian.protect(started.pid)
        return started

    def _entering(self, *words: str) -> list[str]:
        return ["nsenter", f"--target={self._init}", "--all", "env", "--chdir=/", *words]

    def show(self, unit: str, name: str) -> str:
        """Returns a property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).stdout.strip()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Writes a file of the system."""
        inside = self.root / path.lstrip("/")
        for folder in reversed(inside.parents):
            if not folder.exists():
                folder.mkdir()
                folder.chmod(0o777 & ~_UMASK)
        inside.write_text(text, encoding="utf-8")
        inside.chmod(mode)

    def close(self) -> None:
        """Ends every process of the system."""
        with_kill = self._group / "cgroup.kill"
        if with_kill.exists():
            with_kill.write_text("1")
        else:
            os.kill(self._unshare.pid, signal.SIGKILL)  # --kill-child ends the system with it
        self._unshare.wait(BOOT_TIMEOUT_S)
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()
        for folder, _, _ in os.walk(self._group, topdown=False):
            eventually(lambda f=folder: _removed(f), within_s=BOOT_TIMEOUT_S, what=folder)
        self._base.rmdir()


def _removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except OSError:  # its last processes are ending
        return False
    return True


def boot() -> System:
    """A system that has `ep-runtime` where the units look for it, and our Python's packages."""
    paths = [*os.environ["PYTHONPATH"].split(":"), sys.prefix, sys.base_prefix, *sys.path]
    system = System([*{Path(path).resolve(): None for path in paths if Path(path).is_dir()}])
    # Only root may read a checkout's files in some places; each is copied, so only copies change.
    private = ("-not", "-perm", "-o=r", "-not", "-type", "l")
    for path in os.environ["PYTHONPATH"].split(":"):
        system.run("find", path, *private, "-exec", "chmod", "go+rX", "{}", "+")
    system.write("/opt/ep-runtime/bin/ep-runtime", program_text(), 0o755)
    return system


def program_text() -> str:
    """A script that is `ep-runtime` with the packages of this process."""
    return (
        f"#!/bin/sh\nPYTHONPATH={os.environ['PYTHONPATH']} "
        f'exec {sys.executable} -m ep_runtime_client.cli "$@"\n'
    )

"""Runs a pod's container as a kubelet does, in a booted system that plays the node.

Image and network are the system's own: PATH has what an image would bring.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import booted_systemd


class Pod:
    """One pod of a template, on a node."""

    def __init__(
        self,
        system: booted_systemd.System,
        spec: Mapping[str, Any],
        *,
        facts: Mapping[str, str],
        sources: Mapping[str, str],
        entrypoint: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        """
        Args:
            spec: the pod's.
            facts: by path, what `fieldRef` asks for.
            sources: by volume, the folder of the node that stands for a claim or a secret.
            entrypoint: the image's.
            variables: what the image, or a controller, sets.
        """
        self._system = system
        self._spec = spec
        (self._container,) = spec["containers"]
        self._sources = sources
        self._entrypoint = entrypoint
        self._variables = dict(variables)
        for item in self._container["env"]:
            field = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            self._variables[item["name"]] = facts[field] if field else item["value"]

    def start(self) -> subprocess.Popen[bytes]:
        """Runs the container."""
        own = self._container.get("command", self._entrypoint)
        words = [*own, *self._container.get("args", ())]
        return self._system.start(*self._inside(words), **self._variables)

    def probe(self, name: str) -> int:
        """Returns the exit code of a probe's command."""
        words = self._container[name]["exec"]["command"]
        done = self._system.run(*self._inside(words), check=False, **self._variables)
        return done.returncode

    def _inside(self, words: list[str]) -> list[str]:
        """Returns the command line that enters the container's namespaces as its user."""
        words = [re.sub(r"\$\((\w+)\)", lambda found: self._variables[found[1]], w) for w in words]
        script = ["set -e", *self._mounts(), "cd /job", shlex.join(["exec", *self._user(), *words])]
        own_pids = [] if self._spec.get("hostPID") else ["--pid", "--fork", "--mount-proc"]
        unshare = ["unshare", "--mount", "--kill-child", *own_pids]
        if self._spec.get("hostPID"):
            unshare.remove("--kill-child")
        return [*unshare, "sh", "-c", "\n".join(script)]

    def _mounts(self) -> list[str]:
        volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        lines = []
        for mount in self._container["volumeMounts"]:
            volume, place = volumes[mount["name"]], mount["mountPath"]
            lines.append(f"mkdir -p {place}")
            if "emptyDir" in volume:
                lines += self._empty(Path(place))
                continue
            path = volume.get("hostPath", {}).get("path") or self._sources[mount["name"]]
            if volume.get("hostPath", {}).get("type") == "DirectoryOrCreate":
                lines.append(f"mkdir -p -m 755 {path}")
            lines.append(f"mount --bind {path} {place}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {place}")
        if self._container["securityContext"].get("readOnlyRootFilesystem"):
            lines.append("mount -o remount,bind,ro /")
        return lines

    def _empty(self, place: Path) -> list[str]:
        """Returns the lines that mount an empty volume without covering this
        system's own folders.
        """
        covered = [folder for folder in self._system.folders if place in folder.parents]
        kept = {f"/mnt/{number}": folder for number, folder in enumerate(covered)}
        lines = ["mount -t tmpfs tmpfs /mnt"] if kept else []
        lines += [f"mkdir {at}; mount --bind {folder} {at}" for at, folder in kept.items()]
        lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {place}")
        lines += [f"mkdir -p {folder}; mount --bind {at} {folder}" for at, folder in kept.items()]
        return lines

    def _user(self) -> list[str]:
        of_pod = self._spec.get("securityContext", {})
        security = of_pod | self._container["securityContext"]
        groups = [f"--groups={of_pod['fsGroup']}"] if "fsGroup" in of_pod else ["--clear-groups"]
        words = ["setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}"]
        words += groups
        if security["capabilities"]["drop"] == ["ALL"]:
            words += ["--bounding-set=-all", "--inh-caps=-all"]
        if not security["allowPrivilegeEscalation"]:
            words += ["--no-new-privs"]
        return words

"""The processes of `pin-jobs dev`: started so that they can be found again, and ended so that none remains."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from pin_jobs.sandbox.places import last_line

MARK: Final = "PIN_JOBS_DEV"
"""The variable of the environment that all our processes inherit, from child to grandchild: its data folder."""


@dataclass(frozen=True)
class Child:
    """A process of ours, what it is called, and the file that takes its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> "Child":
        """Start a process in a session of its own, where a terminal's Ctrl-C does not reach it; it works in `folder`.

        Its log, `folder/logs/<name>.log`, begins anew.
        """
        log = folder / "logs" / f"{name.replace(' ', '_')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603  # our own interpreter and our own arguments
                list(command),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, process, log)

    @property
    def obituary(self) -> str | None:
        """One line about how it ended; `None` while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"The {self.name} {how}; {self.log} ends with: {last_line(self.log)}"


def stop_children(children: Sequence[Child], seconds: float, hurried: Callable[[], bool]) -> None:
    """SIGTERM to all, SIGKILL to those that remain after `seconds`, or as soon as `hurried()`."""
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + seconds
    while any(child.process.poll() is None for child in children):
        if time.monotonic() > deadline or hurried():
            for child in children:
                child.process.kill()
            break
        time.sleep(0.05)
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=1)


def end_marked_processes(data_dir: Path, grace: float) -> list[str]:
    """End every process that bears the mark of this data folder, whoever its parent is now; return their commands.

    Runs are grandchildren, and one may be born while its siblings end: so it looks again until there are none.
    """
    ended: list[str] = []
    for _ in range(5):
        found = _marked_processes(data_dir)
        if not found:
            break
        ended.extend(_command(process) for process in found)
        end_processes(found, grace)
    return ended


def processes_in(folder: Path, name: str) -> list[psutil.Process]:
    """The processes of that name whose working directory is `folder`."""
    found = []
    resolved = str(folder.resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.name() == name and process.status() != psutil.STATUS_ZOMBIE and process.cwd() == resolved:
                found.append(process)
    return found


def end_processes(processes: list[psutil.Process], grace: float = 3.0) -> None:
    """SIGTERM, `grace` seconds, SIGKILL; returns when they are gone."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=1)


def _marked_processes(data_dir: Path) -> list[psutil.Process]:
    ourselves = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        # Other users' processes do not show their environment; those are not ours.
        with suppress(psutil.Error, OSError):
            # PostgreSQL is never killed, only ever told to stop: its own class does that.
            if process.pid in ourselves or process.name() == "postgres":
                continue
            if process.environ().get(MARK) == str(data_dir) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()[1:4])
    return str(process.pid)

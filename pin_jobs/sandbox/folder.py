"""The data folder of `pin-jobs dev`: made ready, and held by one process at a time."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pin_jobs
from pin_jobs.sandbox.errors import SandboxError


@dataclass(frozen=True)
class DataFolder:
    """The files of one sandbox. Everything that is kept between starts lies in here."""

    path: Path
    _lock: IO[str]

    def announce(self, url: str) -> None:
        """Leave word for whoever tries to start a second time."""
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"{os.getpid()} {url}")
        self._lock.flush()

    @property
    def logs(self) -> Path:
        """Where each process has its log file."""
        return self.path / "logs"

    @property
    def dagster_home(self) -> Path:
        """Dagster's instance; its dagster.yaml is written anew at each start."""
        return self.path / "dagster_home"

    @property
    def workspace(self) -> Path:
        """The workspace file: one code server that the web server and the daemon share."""
        return self.path / "workspace.yaml"

    def write_dagster_files(self, code_server: Path) -> None:
        """Write what Dagster's processes read; `code_server` is the socket of the code server."""
        self.dagster_home.mkdir(exist_ok=True)
        shutil.copyfile(_dagster_yaml(), self.dagster_home / "dagster.yaml")
        self.workspace.write_text(
            f"load_from:\n  - grpc_server:\n      socket: {code_server}\n      location_name: pin_jobs\n"
        )


@contextmanager
def held_data_folder(path: Path) -> Iterator[DataFolder]:
    """Create the folder if need be and hold its lock for the time of the block.

    Raises:
        SandboxError: it cannot be used, or another `pin-jobs dev` runs on it.
    """
    path = path.expanduser().absolute()
    try:
        path = path.resolve()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(path.iterdir()) and not (path / "lock").exists():
            # Its .gitignore would hide, and its owner lose sight of, whatever else lies there.
            raise SandboxError(f"{path} holds other files; name a folder of its own with --data-dir")
        with (path / "lock").open("a+") as lock:
            _acquire(lock, path)
            (path / ".gitignore").write_text("*\n")
            (path / "logs").mkdir(exist_ok=True)
            yield DataFolder(path, lock)
    except (FileExistsError, NotADirectoryError):
        raise SandboxError(f"{path} cannot be the data folder: it, or a part of the path to it, is a file") from None
    except OSError as error:
        raise SandboxError(f"the data folder {path} cannot be used: {error.strerror or error}") from error


def _acquire(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        pid, _, url = lock.read().partition(" ")
        at = url or "the URL is not known yet: it is starting or stopping"
        raise SandboxError(f"pin-jobs dev runs already on {path} (pid {pid or 'unknown'}, {at})") from None
    lock.truncate(0)
    lock.write(f"{os.getpid()} ")
    lock.flush()


def _dagster_yaml() -> Path:
    # The repository's own file, so that an edit takes effect; a wheel brings a copy.
    in_repository = Path(pin_jobs.__file__).resolve().parents[1] / "dagster.yaml"
    return in_repository if in_repository.exists() else Path(__file__).with_name("dagster.yaml")

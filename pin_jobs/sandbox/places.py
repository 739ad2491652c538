"""Where the sandbox puts its files: paths that every server accepts, and folders no more open than they must be."""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pin_jobs.sandbox.errors import SandboxError

# Without spaces, quotes or percent signs: such a path goes unquoted through shells, URLs and configuration files.
_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9_./-]+")
# A socket's whole path may have 103 bytes on macOS and 107 on Linux; the longest name we put behind it is short.
_LONGEST_PATH: Final = 80


def plain_path(folder: Path) -> Path:
    """A path to `folder` that is short and free of special characters: its own, else that of a symbolic link.

    PostgreSQL's start script takes its socket folder unquoted, Valkey's configuration its data folder, and sockets
    have a limit on the length of their path.

    Raises:
        SandboxError: the folder for links in the temporary directory is not ours.
    """
    folder = folder.resolve()
    if _PLAIN_PATH.fullmatch(str(folder)) and len(str(folder)) <= _LONGEST_PATH:
        return folder
    link = _links_folder() / hashlib.sha256(os.fsencode(folder)).hexdigest()[:10]
    if not link.is_symlink() or link.readlink() != folder:
        link.unlink(missing_ok=True)
        link.symlink_to(folder, target_is_directory=True)
    return link


def _links_folder() -> Path:
    # TMPDIR may itself be long or odd, and then there is nothing to gain in it.
    temporary = Path(tempfile.gettempdir())
    base = temporary if _PLAIN_PATH.fullmatch(str(temporary)) and len(str(temporary)) <= 50 else Path("/tmp")  # noqa: S108  # the name is ours and checked below
    folder = base / f"pin_jobs-{os.geteuid()}"
    folder.mkdir(mode=0o711, exist_ok=True)
    # Anybody may create names in a temporary directory; following somebody else's would hand them our data.
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise SandboxError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    return folder


@contextmanager
def traversable(folders: list[Path], say: Callable[[str], None]) -> Iterator[None]:
    """Let other users pass through the parents of `folders`, and see to it that the block opens them no further.

    Does nothing but for root: PostgreSQL refuses to run as root, so a system user runs it, who must get through. The
    PostgreSQL library does more, it makes all those parents readable to everyone; that is taken back.
    """
    if os.geteuid() != 0:
        yield
        return
    modes = {parent: parent.stat().st_mode & 0o7777 for folder in folders for parent in folder.resolve().parents}
    for parent, mode in modes.items():
        if mode | 0o011 != mode:
            say(f"{parent} can now be passed through by all users: as root, PostgreSQL runs as a user of its own")
            parent.chmod(mode | 0o011)
    try:
        yield
    finally:
        for parent, mode in modes.items():
            if parent.stat().st_mode & 0o7777 != mode | 0o011:
                parent.chmod(mode | 0o011)


def last_line(*logs: Path, saying: tuple[str, ...] = ("",)) -> str:
    """The last line that says something, of the first of `logs` that has one; for error messages.

    With `saying`: the last line that holds one of these words.
    """
    for log in logs:
        try:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - 16_384))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        for line in reversed(lines):
            if line.strip(" -") and any(word in line for word in saying):
                return line.strip()[:300]
    return "nothing"

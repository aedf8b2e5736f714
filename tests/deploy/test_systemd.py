"""The units pass systemd-analyze, and keep the promises that the service's shutdown relies on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scheduler_svc.config import load_config
from scheduler_svc.flags import parse

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = DEPLOY / "systemd"
SERVICES = ("draftline", "draftline-scheduler", "draftline-frontend", "draftline-worker@")
BINARIES = "/opt/draftline/bin/"


def settings(name: str) -> dict[str, list[str]]:
    """All values of each key of a unit file, in order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_units_verify(tmp_path: Path):
    names = []
    for path in UNITS.glob("draftline*.[st]*[et]"):
        # Only the binaries differ from the installed files: verify asks that they exist.
        text = path.read_text(encoding="utf-8").replace(BINARIES + "draftline-", "/bin/true draftline-")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
        names.append(path.name.replace("@.", "@0."))
    assert len(names) == len(SERVICES) + 1
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], cwd=tmp_path, capture_output=True, text=True
    )
    about_us = [line for line in done.stderr.splitlines() if "draftline" in line]
    assert done.returncode == 0, done.stderr
    assert not about_us


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("service", SERVICES)
def test_exposure_is_low(service: str, tmp_path: Path):
    """systemd's own score (0 best, 10 worst), read from the unit alone."""
    name = f"{service}.service".replace("@.", "@0.")
    shutil.copy(UNITS / f"{service}.service", tmp_path / name)
    done = subprocess.run(
        [
            "systemd-analyze",
            "security",
            "--offline=true",
            "--threshold=20",
            "--no-pager",
            str(tmp_path / name),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_hardening(service: str):
    found = settings(f"{service}.service")
    for key, value in {
        "User": "draftline",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "KillSignal": "SIGTERM",
        "RuntimeDirectory": "draftline",
        "StateDirectory": "draftline",
    }.items():
        assert found[key] == [value], key
    runs_torch = service in ("draftline", "draftline-worker@")
    assert ("MemoryDenyWriteExecute" in found) != runs_torch


@pytest.mark.parametrize("service", SERVICES[:3])
def test_the_stop_leaves_time_to_drain_and_reaches_the_launcher_alone(service: str):
    found = settings(f"{service}.service")
    grace = load_config(DEPLOY / "draftline.toml").drain_grace_seconds
    draining_parts = 2 if service == "draftline" else 1  # frontend, then scheduler
    assert float(found["TimeoutStopSec"][0]) > draining_parts * (grace + 10)
    assert found["KillMode"] == ["mixed"]
    assert found["RestartPreventExitStatus"] == ["2"]


def test_parts_share_what_they_must():
    for service in SERVICES[1:]:
        found = settings(f"{service}.service")
        assert found["RuntimeDirectoryPreserve"] == ["yes"]
        assert found["Conflicts"] == ["draftline.service"]
        assert found["PartOf"] == ["draftline-parts.target"]
        assert f"{service}.service".replace("@.", "@0.") in settings("draftline-parts.target")["Wants"][0]


def test_parts_stop_in_the_order_of_the_data():
    """systemd stops in the reverse of After=: frontend, scheduler, worker."""
    assert "draftline-scheduler.service" in settings("draftline-frontend.service")["After"][0]
    assert "draftline-worker@0.service" in settings("draftline-scheduler.service")["After"][0]
    assert "draftline" not in settings("draftline-worker@.service")["After"][0]


@pytest.mark.parametrize(
    ("service", "role"),
    [("draftline", "all"), ("draftline-scheduler", "scheduler"), ("draftline-frontend", "frontend")],
)
def test_the_command_is_one_that_the_launcher_takes(service: str, role: str):
    words = settings(f"{service}.service")["ExecStart"][0].split()
    assert words[0] == BINARIES + "draftline-server"
    arguments = [word.replace("/etc/draftline", str(DEPLOY)) for word in words[1:]]
    launch = parse(arguments)
    assert launch.role == role
    assert launch.config == load_config(None, {"runtime_dir": "/run/draftline"})


def test_the_user_is_made():
    line = next(
        line
        for line in (UNITS / "draftline.sysusers.conf").read_text().splitlines()
        if not line.startswith("#")
    )
    assert line.split()[:2] == ["u", "draftline"]
    assert line.split()[-1] == "/var/lib/" + settings("draftline.service")["StateDirectory"][0]

"""The compose file is valid, and images, paths and users fit together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from scheduler_svc.config import load_config
from scheduler_svc.flags import parse

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"


def compose_command() -> list[str] | None:
    """`docker compose`, or the same program by its other name; None where neither is installed."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            version = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
            if version.returncode == 0 and not version.stdout.startswith(("1.", "v1.")):
                return command
    return None


@pytest.fixture(scope="module")
def services() -> dict:
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]


@pytest.mark.skipif(compose_command() is None, reason="docker compose is not installed here")
def test_docker_compose_takes_the_file():
    command = [*compose_command(), "-f", str(COMPOSE), "config"]
    done = subprocess.run([*command, "-q"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    resolved = json.loads(
        subprocess.run([*command, "--format", "json"], capture_output=True, check=True).stdout
    )
    assert set(resolved["services"]) == {"frontend", "scheduler", "worker"}
    for service in resolved["services"].values():
        context = Path(service["build"]["context"])
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()


def test_scheduler_and_worker_share_dev_shm(services: dict):
    assert services["scheduler"]["ipc"] == "shareable"
    assert services["worker"]["ipc"] == "service:scheduler"
    assert services["worker"]["depends_on"]["scheduler"]["restart"] is True


def test_all_share_the_sockets_and_the_settings(services: dict):
    for service in services.values():
        assert "runtime:/run/draftline" in service["volumes"]
        assert "./draftline.toml:/etc/draftline/draftline.toml:ro" in service["volumes"]
    assert (
        services["frontend"]["volumes"] == services["worker"]["volumes"]
    )  # the tokenizer's path is the worker's


def test_every_part_restarts_and_is_confined(services: dict):
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_commands_are_ones_that_the_launcher_takes(services: dict):
    for role in ("scheduler", "frontend"):
        arguments = [word.replace("/etc/draftline", str(DEPLOY)) for word in services[role]["command"]]
        launch = parse(arguments)
        assert launch.role == role
        assert launch.config.runtime_dir == "/run/draftline"
    assert (
        launch.config.listen == "0.0.0.0:50051"
    )  # the container's own address is not reachable from outside
    assert services["frontend"]["ports"][0].endswith(":50051")


def test_the_stop_leaves_time_to_drain(services: dict):
    grace = load_config(DEPLOY / "draftline.toml").drain_grace_seconds
    for name in ("scheduler", "frontend"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > grace + 10


def test_the_health_check_is_a_command_of_the_image(services: dict):
    from draftline.cli.app import build_app
    from typer.testing import CliRunner

    check = services["frontend"]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "draftline"]
    nobody = [word.replace("127.0.0.1:50051", "127.0.0.1:1") for word in check[2:]]
    result = CliRunner().invoke(build_app(), nobody)
    assert result.exit_code == 1, "a wrong flag would be 2"
    assert result.stderr.startswith("error: UNAVAILABLE")
    assert "client" in extras("service")


def extras(image: str) -> set[str]:
    """The extras that an image installs."""
    text = (DEPLOY / f"Dockerfile.{image}").read_text(encoding="utf-8")
    installed = re.search(r"draftline-\*\.whl\)\[([^]]*)\]", text)[1]
    default = re.search(r"ARG EXTRA=(\S+)", text)
    return set(installed.replace("${EXTRA}", default[1] if default else "").split(","))


def test_images_install_extras_that_exist_and_the_service_no_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]

    def requirements(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in optional[extra]:
            nested = re.fullmatch(r"draftline\[(.*)\]", requirement)
            found |= (
                set().union(*(requirements(name) for name in nested[1].split(",")))
                if nested
                else {requirement}
            )
        return found

    assert extras("service") == {"frontend", "client"}
    assert not [r for extra in extras("service") for r in requirements(extra) if r.startswith("torch")]
    assert [r for extra in extras("worker") for r in requirements(extra) if r.startswith("torch")]


def test_images_run_as_the_same_user_with_the_project_s_commands():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    texts = [(DEPLOY / f"Dockerfile.{image}").read_text(encoding="utf-8") for image in ("service", "worker")]
    users = {re.search(r"useradd --uid (\d+)", text)[1] for text in texts}
    runtime = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"]["runtime"]["driver_opts"]["o"]
    assert users == {re.search(r"uid=(\d+)", runtime)[1]}
    assert all("\nUSER draftline\n" in text for text in texts)
    for text in texts:
        assert json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])[0] in scripts


def test_the_build_context_holds_what_the_wheel_needs():
    """Every package of the wheel and every file it names passes the ignore files."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {
        package.split("/")[0] for package in wheel["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    needed |= {"protos", "pyproject.toml", "constraints.txt", wheel["project"]["readme"], "LICENSE"}
    for image in ("service", "worker"):
        lines = (DEPLOY / f"Dockerfile.{image}.dockerignore").read_text(encoding="utf-8").splitlines()
        allowed = {line[1:].split("/")[0] for line in lines if line.startswith("!")}
        assert lines.index("*") < min(lines.index(line) for line in lines if line.startswith("!"))
        assert needed <= allowed


def test_the_worker_s_wheel_is_built_where_there_is_a_compiler():
    """Without one the wheel has no CPU kernels; and kernels of this machine must not slip in instead."""
    text = (DEPLOY / "Dockerfile.worker").read_text(encoding="utf-8")
    build = re.search(r"^FROM (\S+) AS build$", text, re.MULTILINE)[1]
    assert not build.endswith("-slim")
    assert "**/*.so" in (DEPLOY / "Dockerfile.worker.dockerignore").read_text(encoding="utf-8").splitlines()

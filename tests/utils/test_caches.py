"""Folders for compiled code: private ones, whatever others have put in place of them."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.utils import caches
from rl.utils.caches import IN_HOME, IN_TMP, find_fault, name_numba_folder, use_private_caches

NOBODY = 65534


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))
    return home


def folders(**environment):
    assert use_private_caches(environment) == []
    return {name: Path(value) for name, value in environment.items()}


def test_compiled_code_is_kept_in_a_private_folder_of_the_user(home):
    made = folders()
    kept = home / ".cache" / "relay" / "compiled"
    assert made == {name: kept / inside for name, inside in IN_TMP.items()}
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    kept.chmod(0o755)
    assert folders() == made  # the same for later runs, and private again
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def test_kernels_are_compiled_again_when_a_file_changes_that_they_use(tmp_path):
    (tmp_path / "kernels.py").write_text("from lanes import ROWS")
    (tmp_path / "lanes.py").write_text("ROWS = 4")
    before = name_numba_folder([tmp_path])
    assert name_numba_folder([tmp_path]) == before
    (tmp_path / "lanes.py").write_text("ROWS = 8")
    assert name_numba_folder([tmp_path]) != before


def test_folder_of_the_users_caches_is_respected(home, tmp_path):
    made = folders(XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert made["TORCHINDUCTOR_CACHE_DIR"] == tmp_path / "xdg" / "relay" / "compiled" / "inductor"
    assert not (home / ".cache").exists()


def test_folders_that_the_user_has_set_stay(home, tmp_path):
    given = str(tmp_path / "mine")
    made = folders(TORCHINDUCTOR_CACHE_DIR=given, VLLM_CACHE_ROOT=given)
    assert made["TORCHINDUCTOR_CACHE_DIR"] == made["VLLM_CACHE_ROOT"] == Path(given)
    assert made["TRITON_CACHE_DIR"].is_relative_to(home)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("open", "everybody can write into {home}"),
        ("open parent", "everybody can write into {kept.parent}"),
        ("file", "[Errno 17] File exists: '{kept}'"),
        ("link", "{kept} is a link or belongs to another user"),
        ("of somebody else", "{kept} is a link or belongs to another user"),
        ("noexec", "{kept} is mounted noexec"),
        ("relative home", "HOME='relative' is not a folder"),
        ("no home", "Could not determine home directory."),
    ],
)
def test_without_a_private_folder_at_home_a_fresh_one_is_taken(
    home, tmp_path, monkeypatch, what, fault
):
    kept = home / ".cache" / "relay" / "compiled"
    kept.parent.mkdir(parents=True)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    if what == "open parent":
        kept.parent.chmod(0o777)
    elif what == "file":
        kept.write_text("x")
    elif what == "link":
        kept.symlink_to(elsewhere)
    elif what == "of somebody else":
        kept.mkdir()
        os.chown(kept, NOBODY, -1) if os.getuid() == 0 else monkeypatch.setattr(
            os, "getuid", lambda: 1
        )
    elif what == "open":
        home.chmod(0o777)
    elif what == "noexec":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    elif what == "relative home":
        monkeypatch.setenv("HOME", "relative")
    else:  # a container's user without an entry in /etc/passwd
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr("atexit.register", lambda function: None)
    environment: dict[str, str] = {}
    (warning,) = use_private_caches(environment)
    assert warning.startswith(
        "each run compiles its code again, as the user's caches cannot keep it ("
    )
    assert warning.endswith(
        f"{fault.format(home=home, kept=kept)}): set XDG_CACHE_HOME to a folder that only you can "
        "write"
    )
    made = {name: Path(value) for name, value in environment.items()}
    assert set(made) == {*IN_TMP, *IN_HOME}
    (fresh,) = {path.parent for path in made.values()}
    assert not fresh.is_relative_to(home)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    assert list(elsewhere.iterdir()) == []
    fresh.rmdir()


def test_folder_of_the_user_where_others_write_is_named(home, tmp_path):
    given = tmp_path / "shared"
    given.mkdir()
    given.chmod(0o777)
    for path in (given, given / "inductor"):
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(path)}
        (warning,) = use_private_caches(environment)
        says = (
            f"TORCHINDUCTOR_CACHE_DIR={path}: others can write there (everybody can write into "
            f"{given})"
        )
        assert warning == f"{says}, and their code would run as you"
        assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(path)
    given.chmod(0o1777)  # as /tmp: what belongs to this user cannot be replaced there
    (given / "inductor").mkdir()
    assert find_fault(given / "inductor") is None
    assert find_fault(given) is not None


def test_folder_that_cannot_be_examined_is_a_fault(tmp_path, monkeypatch):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "circle" in str(find_fault(tmp_path / "circle" / "inside"))
    assert find_fault(Path("~nobody-of-this-name/triton")) == "Could not determine home directory."
    monkeypatch.setattr(Path, "is_symlink", refuse)
    assert "Permission denied" in str(find_fault(tmp_path / "closed" / "inside"))


def refuse(path):
    raise PermissionError(13, "Permission denied", str(path))


def test_link_on_the_way_that_somebody_else_can_change_is_a_fault(tmp_path):
    (open_to_all := tmp_path / "open").mkdir()
    open_to_all.chmod(0o777)
    (target := tmp_path / "target").mkdir()
    (open_to_all / "link").symlink_to(target)
    assert find_fault(target) is None
    assert find_fault(open_to_all / "link") == f"everybody can write into {open_to_all}"


def test_caches_are_settled_when_the_actors_package_is_imported(home):
    code = "import actors, os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    environment = {name: value for name, value in os.environ.items() if name not in IN_TMP}
    root = Path(caches.__file__).parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == str(home / ".cache" / "relay" / "compiled" / "inductor")

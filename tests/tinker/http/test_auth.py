"""Keys: which may call, and whom they stand for."""

import pytest

from rl.tinker.http.auth import Keys, read_keys

ALICE, BOB = "tml-" + "a" * 20, "tml-" + "b" * 20


def write(folder, text, mode=0o600):
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_each_key_is_an_owner_of_its_own_and_no_owner_shows_its_key():
    keys = Keys([ALICE, BOB])

    alice, bob = keys.owner(ALICE.encode()), keys.owner(BOB.encode())

    assert alice is not None
    assert alice != bob
    assert alice == Keys([BOB, ALICE]).owner(ALICE.encode())
    assert len(alice) == 64
    assert "aaaa" not in alice


@pytest.mark.parametrize("key", [b"", b"tml-", ALICE.encode()[:-1], ALICE.encode() + b" ", b"\xff\x00"])
def test_other_keys_are_nobody(key):
    assert Keys([ALICE]).owner(key) is None


def test_without_keys_each_caller_is_its_own_owner_but_has_to_be_one():
    keys = Keys()

    assert not keys.configured
    assert keys.owner(b"tml-x") != keys.owner(b"tml-y")
    assert keys.owner(b"") is None


def test_a_file_gives_one_key_a_line(tmp_path):
    file = write(tmp_path, f"# for the notebook\n{ALICE}\n\n  {BOB}  # second\n")

    keys = read_keys(file=file, environment=None)

    assert keys.owner(ALICE.encode())
    assert keys.owner(BOB.encode())
    assert keys.owner(b"# for the notebook") is None


def test_an_environment_variable_gives_keys_between_commas(monkeypatch):
    monkeypatch.setenv("RELAY_KEYS", f"{ALICE}, {BOB}")

    keys = read_keys(file=None, environment="RELAY_KEYS")

    assert keys.owner(BOB.encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are none"),
        ("sk-aaaaaaaaaaaaaaaaaaaaaaaa", "API key 1: must be printable ASCII that begins with 'tml-'"),
        (f"{ALICE}\ntml-short", "API key 2: 9 characters, must be at least 20"),
        ("tml-aaaaaaaaaaaaaaaaa aaaaaa", "API key 1"),
    ],
)
def test_an_unsafe_key_is_refused_without_being_shown(tmp_path, text, said):
    with pytest.raises(ValueError, match="keys_file=") as error:
        read_keys(file=write(tmp_path, text), environment=None)

    assert said in str(error.value)
    assert not any(line in str(error.value) for line in text.splitlines())


def test_a_file_that_others_can_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="others may read or write it; chmod 600"):
        read_keys(file=write(tmp_path, ALICE, 0o640), environment=None)


def test_keys_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(file=str(tmp_path / "none"), environment=None)
    with pytest.raises(ValueError, match="keys_env='NO_SUCH': no such environment variable"):
        read_keys(file=None, environment="NO_SUCH")
    with pytest.raises(ValueError, match="give one of them"):
        read_keys(file="keys", environment="KEYS")

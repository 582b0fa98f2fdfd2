import pytest

from rl.atomic_file import SUFFIX, replacing


def write_half(file):
    with replacing(file) as new:
        new.write_text("half")
        new.parent.read_text()


def test_a_file_is_replaced_when_it_is_whole_and_else_stays(tmp_path):
    file = tmp_path / "file"
    with replacing(file) as new:
        new.write_text("first")
        assert not file.exists()
        assert new.name == f"file{SUFFIX}"
    assert file.read_text() == "first"
    with pytest.raises(IsADirectoryError):
        write_half(file)
    assert file.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]

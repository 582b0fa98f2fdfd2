"""GGUF files whose counts, lengths and sizes are not those of the file: refused in one line, at
once.
"""

import os
import struct
import time

import pytest

from rl.models.files.assets import resolve_assets
from rl.models.files.gguf_header import check_gguf_header
from tests.support.gguf_files import random_tensors, write_gguf

UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(*settings, tensors=(), num_settings=None, num_tensors=None):
    """Return the bytes of a file with these settings and descriptions of tensors, which may claim
    another number.
    """
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(settings) if num_settings is None else num_settings,
    )
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(settings) + b"".join(tensors)


def setting(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def array(name, of, count, values=b""):
    return setting(name, ARRAY, struct.pack("<IQ", of, count) + values)


def tensor(name="w", dims=(32,), kind=0, offset=0, num_dims=None):
    num_dims = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", num_dims, *dims, kind, offset)


LLAMA = setting("general.architecture", STRING, text("llama"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(LLAMA, array("x", UINT8, 2**40)), "'x' has 1099511627776 values: all arrays must "
                                                  "have at most"),
        (header(LLAMA, array("x", UINT8, 2**20)), "values of 'x': 1048576 do not fit into the "
                                                  "file's 9"),
        (header(LLAMA, array("x", UINT32, 2**63)), "'x' has 9223372036854775808 values"),
        (header(LLAMA, array("x", STRING, 2**22)), "texts of 'x': 4194304 do not fit"),
        (header(LLAMA, array("x", ARRAY, 1, struct.pack("<IQ", UINT8, 2**40))), "'x' is of type 9, "
                                                                                "which is not"),
        (header(LLAMA, array("x", 77, 1)), "'x' is of type 77, which is not supported"),
        (header(LLAMA, setting("x", 13, b"")), "'x' is of type 13, which is not supported"),
        (header(LLAMA, setting("x", STRING, struct.pack("<Q", 2**64 - 1))),
            "'x': 18446744073709551615 do not fit"),
        (header(LLAMA, num_settings=2**63), "settings: 9223372036854775808 do not fit"),
        (header(LLAMA, num_tensors=2**63), "tensors: 9223372036854775808 do not fit"),
        (header(LLAMA, struct.pack("<Q", 2**62)), "a setting's name: 4611686018427387904 do not "
                                                  "fit"),
        (header(LLAMA, setting("general.alignment", UINT32, struct.pack("<I", 3))),
            "alignment=3: must be a power"),
        (header(LLAMA, setting("general.alignment", UINT32, struct.pack("<I", 0))),
            "alignment=0: must be a power"),
        (header(LLAMA, tensors=[tensor(num_dims=2**31)]), "tensor 'w' has 2147483648 dimensions"),
        (header(LLAMA, tensors=[tensor(dims=(2**40, 2**40))]), "tensor 'w' ends at byte .* the "
                                                               "file is truncated"),
        (header(LLAMA, tensors=[tensor(dims=(2**32,) * 4)]), "tensor 'w' ends at byte"),
        (header(LLAMA, tensors=[tensor(offset=2**63)]), "tensor 'w' ends at byte"),
        (header(LLAMA, tensors=[tensor(kind=999)]), "tensor 'w' is of type 999, which is not "
                                                    "supported"),
        (header(LLAMA, tensors=[tensor(dims=(33,), kind=8)]), "tensor 'w' of shape .33.: rows must "
                                                              "be multiples"),
        (b"GGUF\0\0\0\3" + struct.pack(">QQ", 0, 2**40), "settings: 1099511627776 do not fit"),
        (b"GGUF", "the header: 4 do not fit|version"), (b"", "it is empty"),
        (b"PK\3\4", "does not begin with GGUF"),
    ],
)  # fmt: skip
def test_header_that_does_not_fit_its_file_is_refused_at_once(tmp_path, content, message):
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"^{file}: the GGUF file is damaged or not supported: .*({message})"
    ) as refused:
        resolve_assets(file, cache=tmp_path / "cache")
    assert time.monotonic() - started < 5
    assert "\n" not in str(refused.value)


def test_arrays_are_bounded_together(tmp_path):
    values = bytes(2**20)
    (tmp_path / "a.gguf").write_bytes(
        header(*(array(f"x{i}", UINT8, 2**20, values) for i in range(5)))
    )
    with pytest.raises(
        ValueError, match="'x4' has 1048576 values: all arrays must have at most 4194304 together"
    ):
        check_gguf_header(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "changed", [{"block_count": 2**20}, {"block_count": 2**31 - 1}, {"vocab_size": 2**31}]
)
def test_sizes_that_no_model_has_are_refused_before_it_is_built(tmp_path, changed):
    more = {f"llama.{name}": value for name, value in changed.items()}
    file = write_gguf(tmp_path / "a.gguf", random_tensors(), more=more)
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"^{file}: "):
        resolve_assets(file, cache=tmp_path / "cache")
    assert time.monotonic() - started < 5


def test_files_beside_a_gguf_file_are_not_read(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", random_tensors())
    alone = resolve_assets(file, cache=tmp_path / "alone")
    (tmp_path / "secret").write_text("secret")
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(tmp_path / "secret")
    os.symlink(file, tmp_path / "link.gguf")
    beside = resolve_assets(tmp_path / "link.gguf", cache=tmp_path / "beside")
    assert {path.name: path.read_bytes() for path in alone.iterdir()} == {
        path.name: path.read_bytes() for path in beside.iterdir()
    }

"""Whatever happens to the files of a checkpoint, what is loaded is what was saved: it, or the one before."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from rl.training.checkpoint_files import DamagedCheckpointError, check_small_files, saved_steps
from rl.training.damaged import newest_usable, put_aside
from rl.types import LoopPosition
from tests.support.disks import as_nobody
from tests.training.parts import make_engine, make_samples, write_assets

NUM_FAULTS = 15


def flip_a_bit(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def cut_short(content, rng):
    return content[: rng.randrange(len(content))]


def lose_a_block(content, rng):
    """As a disk does that had noted the length before it had the data."""
    at = rng.randrange(len(content)) // 512 * 512
    return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]


def grow(content, rng):
    return content + rng.randbytes(rng.randrange(1, 100))


def vanish(content, rng):
    return None


FAULTS = (flip_a_bit, cut_short, lose_a_block, grow, vanish)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture(scope="module")
def saved(assets, tmp_path_factory):
    """Two checkpoints, and the parameters of each by its step."""
    folder, engine = tmp_path_factory.mktemp("saved"), make_engine(assets)
    parameters = {}
    for number in (1, 2):
        engine.forward_backward(make_samples())
        engine.optim_step()
        engine.save_checkpoint(
            str(folder / f"step-{number}"),
            position=LoopPosition(step=number, num_problems=8 * number),
            attachments={"loop.pickle": b"the rest of the loop" * 50},
        )
        parameters[number] = weights(engine)
    return folder, parameters


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.model_state_dict().items()}


def load_newest(engine, folder):
    """As a run that goes on does; the policy version."""

    def load(path):
        check_small_files(path)
        return engine.load_checkpoint(str(path))

    return newest_usable(folder, load)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_damage_is_loaded(assets, saved, tmp_path, caplog, fault):
    folder, parameters = saved
    engine, rng = make_engine(assets), random.Random(fault.__name__)
    names = sorted(path.name for path in (folder / "step-2").iterdir())
    assert len(names) == 5
    harmless = []
    for number in range(NUM_FAULTS):
        caplog.clear()
        here = tmp_path / str(number)
        shutil.copytree(folder, here)
        file = here / "step-2" / names[number % len(names)]
        before = file.read_bytes()
        after = fault(before, rng)
        if after is None:
            file.unlink()
        else:
            file.write_bytes(after)
        version = load_newest(engine, here)
        assert version in parameters
        loaded = weights(engine)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in parameters[version].items())
        if version == 2:
            harmless.append((file.name, before, after))
            continue
        assert list(saved_steps(here)) == [1]
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert str(here / "step-2") in record.message
        assert record.message.endswith("set aside as step-2.damaged, and an earlier one is taken")
        shutil.rmtree(here)
    # Spaces of the manifest, or what is cut off is only its last line's end: it says the same as before.
    assert all(name == "manifest.json" or before == after for name, before, after in harmless)


def test_where_a_damaged_one_cannot_be_set_aside_both_are_said():
    def set_aside():
        try:
            put_aside(path, DamagedCheckpointError("checkpoint file x is corrupted"))
        except DamagedCheckpointError as error:
            return str(error)
        return "no error"

    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        path = Path(folder) / "step-2"
        path.mkdir()
        Path(folder).chmod(0o555)
        assert as_nobody(set_aside) == (
            "checkpoint file x is corrupted; it could not be set aside: Permission denied"
        )
        assert path.is_dir()

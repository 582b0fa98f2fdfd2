"""The block of docs/scripts.md that starts the actors itself, with its calls bound to the real signatures."""

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

from actors import launch
from actors.generator import VLLMGenerator
from rl.weights.store import WeightStore

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"


class Actor:
    """Actor whose endpoints only check their arguments."""

    def __init__(self, name, kind, **arguments):
        assert name
        inspect.signature(kind).bind(**arguments)
        self._kind = kind

    def __getattr__(self, name):
        async def call(*args):
            method = inspect.unwrap(getattr(self._kind, name)._method)
            inspect.signature(method).bind(self, *args)
            return {}

        return Mock(call=call)


def test_calls_of_the_three_actors_fit_their_signatures(monkeypatch):
    (block,) = re.findall(r"## The three actors by hand.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    launcher = create_autospec(launch.Launcher, instance=True)
    launcher.spawn_role.return_value.mesh.spawn = Actor
    monkeypatch.setattr(launch, "run", lambda main: asyncio.run(main(launcher)))
    for owner, name in (
        (launch, "setup_process_group_env"),
        (WeightStore, "start"),
        (WeightStore, "announce"),
    ):
        monkeypatch.setattr(owner, name, create_autospec(getattr(owner, name)))
    values: dict[str, Any] = {"generator_config": VLLMGenerator.Config()}
    values |= dict.fromkeys(("trainer_config", "spec", "hf_assets_path", "rubric"))
    exec(block, values)
    assert [one.args[0].role for one in launcher.spawn_role.await_args_list] == [
        "trainer",
        "generator",
        "reward",
    ]

"""DeviceLock over fakes, in virtual time."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from actors.backend import GeneratorClient
from actors.config import Timeouts
from actors.device_lock import DeviceLock
from actors.parity import ParityCheck, ParityText
from rl.types import BoxSum, PullResult, SamplingParams
from rl.utils.errors import RunError
from tests.support.virtual_time import run_in_virtual_time


@dataclass
class Group:
    """Fake actor group: each call takes a second and asserts that this side is awake."""

    name: str
    log: list[str]
    awake: bool
    timeouts: Timeouts = field(default_factory=Timeouts)
    weights: int | None = None
    corrupt_pull: int = 0
    """Number of the pull, from 1 on, that ends with bits other than the pushed ones."""
    num_pulls: int = 0
    logprob_error: float = 0.0
    """Error in nats per token."""

    async def call(self, endpoint: str, *args: Any, extra_s: float = 0.0, **kwargs: Any) -> list[Any]:
        self.log.append(f"{self.name}.{endpoint}{''.join(f' {a}' for a in args)}")
        if endpoint in ("sleep", "wake"):
            assert self.awake == (endpoint == "sleep")
            self.awake = endpoint == "wake"
            self.weights = None
        elif endpoint == "pull_model_state_dict":
            self.weights = args[0]
            self.num_pulls += 1
        elif endpoint == "fail":
            raise RunError("no")
        elif endpoint != "abort":
            assert self.awake, f"{self.name} sleeps"
            assert endpoint != "generate" or self.weights is not None
        await asyncio.sleep(1)
        if endpoint == "compute_logprobs":
            return [[LOGPROBS + self.logprob_error]]
        if endpoint == "pull_model_state_dict":
            wrong = self.num_pulls == self.corrupt_pull
            return [PullResult(policy_version=args[0], time_s=1.0, sums=(sum_of(args[0] + wrong),))]
        return [self.weights]


LOGPROBS = np.array([0.0, -1.0], dtype=np.float32)


def sum_of(value: int) -> BoxSum:
    return BoxSum(name="w", dtype="float32", global_shape=(2,), offsets=(0,), shape=(2,), value=value)


def make(
    num_generators: int = 1, canary: ParityText | None = None, **faults: Any
) -> tuple[DeviceLock, list[str]]:
    """Return a DeviceLock over a trainer that pushed versions 1 to 7, and its log. Call it in the event loop;
    `faults` apply to the last generator.
    """
    log: list[str] = []
    generators = [Group(f"g{i}", log, awake=False) for i in range(num_generators - 1)]
    generators.append(Group(f"g{num_generators - 1}", log, awake=False, **faults))
    check = ParityCheck(canary)
    for version in range(1, 8):
        expected: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        expected.set_result([[LOGPROBS]])
        check.expect(version, sums=[sum_of(version)], expected=expected)
    return DeviceLock(
        trainer=cast(Any, Group("t", log, awake=True)), generators=cast(Any, generators), check=check
    ), log


def run(coroutine: Any) -> Any:
    return run_in_virtual_time(coroutine)


def test_devices_change_sides_once_per_phase():
    async def main() -> list[str]:
        turns, log = make()
        (generator,) = turns.generators
        for step in (1, 2):
            await turns.trainer.call("push_model_state_dict")
            await generator.call("pull_model_state_dict", step)
            await generator.call("generate")
            await turns.trainer.call("forward_backward")
            await turns.trainer.call("optim_step")
        return log

    to_generators, to_trainer = ["t.sleep", "g0.wake"], ["g0.sleep", "t.wake"]
    assert run(main())[0] == [
        "t.push_model_state_dict", *to_generators, "g0.pull_model_state_dict 1", "g0.generate",
        *to_trainer, "t.forward_backward", "t.optim_step",
        "t.push_model_state_dict", *to_generators, "g0.pull_model_state_dict 2", "g0.generate",
        *to_trainer, "t.forward_backward", "t.optim_step",
    ]  # fmt: skip


def test_generators_that_slept_since_their_pull_pull_the_same_version_again():
    async def main() -> Any:
        turns, log = make(num_generators=2)
        first, second = turns.generators
        await asyncio.gather(*(g.call("pull_model_state_dict", 7) for g in (first, second)))
        await turns.trainer.call("save_checkpoint")
        log.clear()
        assert await first.call("generate") == [7]
        return log

    assert run(main())[0] == [
        "t.sleep", "g0.wake", "g1.wake",
        "g0.pull_model_state_dict 7", "g1.pull_model_state_dict 7", "g0.generate",
    ]  # fmt: skip


def drawn_after_the_trainer_had_the_devices(**settings: Any) -> list[str]:
    """Return the log, which ends with the error if the second pull fails."""

    async def main() -> list[str]:
        turns, log = make(num_generators=2, **settings)
        first, second = turns.generators
        await asyncio.gather(*(g.call("pull_model_state_dict", 7) for g in (first, second)))
        await turns.trainer.call("save_checkpoint")
        try:
            await first.call("generate")
        except RunError as error:
            log.append(f"{type(error).__name__}: {error}")
        return log

    return run(main())[0]


def test_second_pull_with_other_bits_names_generator_tensor_and_version():
    log = drawn_after_the_trainer_had_the_devices(corrupt_pull=2)
    assert "g0.generate" not in log
    assert log[-1].startswith("WeightParityError")
    assert "version 7: generator 'g1' holds other bits in 'w'" in log[-1]


def test_calls_of_one_side_overlap_and_the_other_side_waits_for_all_of_them():
    async def main() -> list[str]:
        turns, log = make()
        (generator,) = turns.generators
        await generator.call("pull_model_state_dict", 1)
        log.clear()
        calls = [generator.call("generate") for _ in range(3)]
        await asyncio.gather(*calls, turns.trainer.call("forward_backward"))
        return log

    log, took_s = run(main())
    assert log == ["g0.generate"] * 3 + ["g0.sleep", "t.wake", "t.forward_backward"]
    assert (
        took_s == 2 + 1 + 1 + 2 + 1
    )  # switch to the generators, a pull, three calls at once, switch back, a gradient


def test_cancelled_completion_ends_while_the_trainer_has_the_devices():
    async def main() -> list[str]:
        turns, log = make()
        (generator,) = turns.generators
        await generator.call("pull_model_state_dict", 1)
        client = GeneratorClient(generator)
        drawing = asyncio.create_task(client.generate([], sampling=SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.5)
        log.clear()
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        await turns.trainer.call("forward_backward")
        return [call.split(" ")[0] for call in log]

    assert "g0.abort" in run(main())[0]

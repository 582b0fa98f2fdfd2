"""A local backend that keeps what it has sampled, to compare with what its clients recorded."""

from __future__ import annotations

from rl.tinker.local import LocalTinkerBackend
from rl.tinker.types import SampleOutput, SampleRequest
from tools.tinker_cookbook.recipes import Sample


class SampleLog:
    """Samples of a server, written by its thread and read when a recipe has ended."""

    def __init__(self) -> None:
        self._samples: list[tuple[SampleRequest, SampleOutput]] = []

    def add(self, request: SampleRequest, output: SampleOutput) -> None:
        self._samples.append((request, output))

    def take(self) -> tuple[Sample, ...]:
        """Return the completions since the last call, and forget them."""
        taken, self._samples = self._samples, []
        completions = []
        for request, output in taken:
            prompt = tuple(request.prompt.tolist())
            for one in output.completions:
                completions.append(
                    Sample(
                        prompt=prompt,
                        tokens=tuple(one.token_ids.tolist()),
                        logprobs=tuple(one.logprobs.tolist()),
                    )
                )
        return tuple(completions)


class RecordingBackend(LocalTinkerBackend):
    """Local backend with a log of its samples."""

    def __init__(self, *, config: LocalTinkerBackend.Config, samples: SampleLog) -> None:
        super().__init__(config=config)
        self._samples = samples

    async def sample(self, version: int, request: SampleRequest, owner: str = "") -> SampleOutput:
        output = await super().sample(version, request, owner)
        self._samples.add(request, output)
        return output

"""The official client, unmodified, on a server whose backend is a trainer and a generator."""

import numpy as np
import pytest
from tinker import types

from actors.processes import identify, is_alive, with_descendants
from tests.support.tinker_data import TEXTS, forward, learn, lora, text_datum
from tests.support.tinker_server import RESULT_TIMEOUT_S, server_process

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

DATA = [text_datum(text) for text in TEXTS]


def test_a_server_over_actors_trains_and_samples_and_ends_with_all_its_processes(tmp_path):
    with server_process(tmp_path / "storage", "--config", "tiny_actors") as server:
        controller = identify(server.process.pid)
        assert controller is not None
        processes = with_descendants([controller])
        client = server.client()
        model = lora(client)
        losses = learn(model, DATA, steps=8)
        sampler = model.save_weights_and_get_sampling_client().result(RESULT_TIMEOUT_S)
        tokens = list(TEXTS[0].encode())
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(RESULT_TIMEOUT_S)
        drawn = sampler.sample(
            prompt=types.ModelInput.from_ints(tokens[:6]),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=9, temperature=0.0, stop=[]),
        ).result(RESULT_TIMEOUT_S)
        (trained, *_) = forward(model, DATA)
        status = server.end()

        assert losses[-1] < 0.6 * losses[0]
        # The trainer's adapters beside the weights, and the generator's sums of both, say the same.
        np.testing.assert_allclose(scored[1:], trained, atol=1e-4)
        assert [len(sequence.tokens) for sequence in drawn.sequences] == [9, 9]
        assert drawn.sequences[0].tokens == drawn.sequences[1].tokens
        assert len(processes) >= 3
        assert (status, [process for process in processes if is_alive(process)]) == (0, [])
        assert "Error" not in server.log, server.log

"""Both clients are timed at the same work, in turns."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.tinker_overhead import PARTS, Side, compare, figures, main


class Model:
    """Its steps have these losses."""

    def __init__(self, losses):
        self._losses = iter(losses)

    def save_weights_and_get_sampling_client(self):
        return done(self)

    def sample(self, prompt, num_samples, params):
        sequence = SimpleNamespace(tokens=[3, 4], logprobs=[-1.0, -1.0])
        return done(SimpleNamespace(sequences=[sequence] * num_samples))

    def forward_backward(self, data, loss):
        assert (len(data), loss) == (4, "importance_sampling")
        assert data[0].loss_fn_inputs["advantages"].tolist() == [0.0, -1.0, -1.0]
        return done(SimpleNamespace(metrics={"loss:sum": next(self._losses)}))

    def optim_step(self, params):
        return done(None)


def done(value):
    return SimpleNamespace(result=lambda timeout: value)


def side(losses):
    return Side(training=Model(losses), prompts=[[1, 2]])


def test_the_first_turn_does_not_count():
    sides = {"in_process": side([1.0] * 8), "http": side([1.0] * 8)}
    compare(sides, turns=3, steps=2)
    assert all(len(s.seconds[part]) == 6 for s in sides.values() for part in PARTS)
    assert all(len(s.losses) == 8 for s in sides.values())


def test_the_ratio_is_of_the_medians_of_whole_steps():
    sides = {"in_process": side([]), "http": side([])}
    sides["in_process"].seconds = {"snapshot": [0.1] * 3, "sample": [1.0, 9.0, 0.9], "train": [0.9, 0.9, 1.0]}
    sides["http"].seconds = {"snapshot": [0.2] * 3, "sample": [1.5, 1.4, 1.5], "train": [1.3, 1.4, 9.0]}
    result = figures(sides)
    assert result["step_s"] == {"in_process": 2.0, "http": 3.0}
    assert result["ratio"] == 1.5
    assert result["parts_s"]["http"] == {"snapshot": 0.2, "sample": 1.5, "train": 1.4}


def test_different_losses_are_no_comparison():
    with pytest.raises(RuntimeError, match="the losses differ"):
        compare({"in_process": side([1.0, 2.0]), "http": side([1.0, 2.1])}, turns=1, steps=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_http_costs_less_than_half_of_a_step(capsys):
    main(["--quick"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratio"] <= 1.5
    assert set(result["parts_s"]["http"]) == set(PARTS)

import torch

from rl.models.buffers import persistent_buffers
from rl.training.engine import TrainingEngine
from tests.support.policies import ROUTE_BIAS, biased_spec, small_spec


def test_buffers_that_belong_to_the_weights_are_told_from_parameters_and_from_tables():
    assert persistent_buffers(small_spec().model.build()) == {}
    buffers = persistent_buffers(biased_spec().model.build())
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {"route_bias": list(ROUTE_BIAS)}


def test_a_weight_under_two_names_is_no_buffer():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert persistent_buffers(model) == {}


def test_engine_gives_out_its_buffers_with_the_parameters_and_says_which_they_are():
    engine = TrainingEngine.Config().build(model_spec=biased_spec(), hf_assets_path=None, device="cpu")
    state = engine.model_state_dict()
    assert state.keys() == {*engine.policy.parameters, "route_bias"}
    assert engine.buffer_names() == {"route_bias"}
    assert state["route_bias"].tolist() == list(ROUTE_BIAS)
    assert state["route_bias"].data_ptr() == engine.policy.model.get_buffer("route_bias").data_ptr()

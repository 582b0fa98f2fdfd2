import math

import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.types import LossInputs


def test_loss_is_the_negative_logprob_of_masked_tokens_whatever_was_drawn():
    logprobs = torch.tensor([0.5, 0.25, 0.125]).log().requires_grad_()
    output = CrossEntropyLoss()(
        LossInputs(
            logprobs=logprobs,
            generator_logprobs=torch.full((3,), math.nan),
            advantages=torch.tensor([5.0, 5.0, 5.0]),
            mask=torch.tensor([True, False, True]),
            sequence_ids=torch.tensor([0, 0, 1]),
            num_sequences=2,
        )
    )
    assert output.loss_sum.item() == pytest.approx(math.log(2) + math.log(8))
    assert output.denominator is not None
    assert output.denominator.item() == 2
    assert output.num_tokens.item() == 2
    (grad,) = torch.autograd.grad(output.loss_sum, logprobs)
    assert grad.tolist() == [-1.0, 0.0, -1.0]

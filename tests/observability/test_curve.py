import math

import matplotlib.image
import numpy as np

from rl.observability.metrics import MetricsWriter
from rl.observability.summary import CORRECT, EVALUATION, REWARD, write_learning_curve


def draw(tmp_path, records):
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "learning_curve.png"
    with MetricsWriter(metrics) as writer:
        for record in records:
            writer.write(record)
    write_learning_curve(metrics, png)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["learning_curve.png", "metrics.jsonl"]
    return matplotlib.image.imread(png)[..., :3]


def num_pixels(image, color):
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image - wanted) < 0.02).all(axis=-1).sum())


def step_record(step, **metrics):
    return {"step": step, "policy_version": step, **{k.replace("__", "/"): v for k, v in metrics.items()}}


def test_curve_shows_reward_correctness_and_evaluation(tmp_path):
    steps = [step_record(s, reward__mean=s / 50, reward__correct=s / 100) for s in range(1, 51)]
    evaluations = [step_record(s, eval__correct=s / 60) for s in (0, 25, 50)]
    image = draw(tmp_path, steps + evaluations)
    for color in (REWARD, CORRECT, EVALUATION):
        assert num_pixels(image, color) > 500
    assert image.shape == (840, 1200, 3)


def test_diverged_run_and_bit_identical_logprobs_are_drawn(tmp_path):
    records = [
        step_record(s, reward__mean=math.nan if s > 4 else 0.5, logprob_diff__mean=0.0, logprob_diff__max=0.0)
        for s in range(1, 9)
    ]
    assert num_pixels(draw(tmp_path, records), REWARD) > 200

"""Last lines and learning curve of a run."""

import json
import math

import matplotlib.image
import numpy as np

from rl.observability.console import describe_results
from rl.observability.metrics import CORRECT, EVALUATION, REWARD, draw_learning_curve
from rl.observability.run_folder import RunFolder

STEPS = [{"step": step, "reward/mean": 0.5} for step in (1, 2, 3)]


def evaluation(step, correct):
    return {"step": step, "eval/correct": correct, "eval/num_problems": 512}


def test_summary_has_evaluations_and_results(tmp_path):
    records = [
        evaluation(0, 0.375),
        *STEPS[:2],
        evaluation(2, 0.9),
        STEPS[2],
        evaluation(3, 0.97949),
    ]
    with RunFolder.create(tmp_path, "run") as folder:
        for name in ("step-2", "step-3", "hf", "adapter"):
            (folder.checkpoints / name).mkdir()
        folder.learning_curve.touch()
        assert describe_results(records, folder=folder, run_s=252.4) == (
            "finished: 3 steps in 0:04:12\n"
            "  evaluation      correct 0.375 -> 0.979 of 512 problems\n"
            f"  checkpoint      {tmp_path}/run/checkpoints/step-3\n"
            f"  Hugging Face    {tmp_path}/run/checkpoints/hf\n"
            f"  LoRA adapter    {tmp_path}/run/checkpoints/adapter\n"
            f"  learning curve  {tmp_path}/run/learning_curve.png\n"
            f"  report          python -m rl.report {tmp_path}/run"
        )


def test_findings_follow_the_report(tmp_path):
    step = {"step": 1, "time/step_s": 10.0, "time/score_s": 9.0, "time/train_s": 1.0}
    with RunFolder.create(tmp_path, "run") as folder:
        text = describe_results(
            [step],
            folder=folder,
            run_s=1.0,
            findings={"slow_reward": "The reward is slow. Since step 3 ...", "x": "Another."},
        )
    _, report, *rest = text.splitlines()
    assert report.startswith("  report          ")
    assert rest[:2] == [
        "  finding         The reward is slow. Since step 3 ...",
        "  finding         Another.",
    ]
    assert rest[2].startswith("  bottleneck      ")


def test_bottleneck_comes_last(tmp_path):
    step = {"step": 1, "time/step_s": 10.0, "time/score_s": 9.0, "time/train_s": 1.0}
    with RunFolder.create(tmp_path, "run") as folder:
        text = describe_results(
            [step], folder=folder, run_s=1.0, config={"reward": {"num_procs": 1}}
        )
    assert text.splitlines()[2:] == [
        "  bottleneck      Scoring takes 90% of a step: reward functions are slow; more processes "
        "score in parallel",
        "  would move it   --reward.num_procs 2",
    ]


def test_curve_shows_reward_correctness_and_evaluation_also_of_a_diverged_run(tmp_path, caplog):
    metrics, png = tmp_path / "metrics.jsonl", tmp_path / "learning_curve.png"
    rewards = [math.nan if step > 40 else step / 50 for step in range(1, 51)]
    records = [
        {
            "step": step,
            "reward/mean": str(reward),
            "reward/correct": step / 100,
            "logprob_diff/mean": 0.0,
        }
        for step, reward in enumerate(rewards, start=1)
    ]
    records += [evaluation(step, step / 60) for step in (0, 25, 50)]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    draw_learning_curve(metrics, png)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "learning_curve.png",
        "metrics.jsonl",
    ]
    image = matplotlib.image.imread(png)[..., :3]
    assert image.shape == (600, 1200, 3)
    for color in (REWARD, CORRECT, EVALUATION):
        wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image - wanted) < 0.02).all(axis=-1).sum() > 500
    draw_learning_curve(metrics, tmp_path / "gone" / "curve.png")
    assert (
        "gone/curve.png was not written: No such file or directory; the run goes on" in caplog.text
    )

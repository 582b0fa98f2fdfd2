from rl.observability.run_folder import RunFolder
from rl.observability.summary import summary

STEPS = [{"step": step, "reward/mean": 0.5} for step in (1, 2, 3)]


def evaluation(step, correct):
    return {"step": step, "eval/correct": correct, "eval/num_problems": 512}


def test_summary_has_evaluations_and_results(tmp_path):
    records = [evaluation(0, 0.375), *STEPS[:2], evaluation(2, 0.9), STEPS[2], evaluation(3, 0.97949)]
    with RunFolder.create(tmp_path, "run") as folder:
        for name in ("step-2", "step-3", "hf", "adapter"):
            (folder.checkpoints / name).mkdir()
        folder.learning_curve.touch()
        folder.timeline.touch()
        assert summary(records, folder=folder, run_s=252.4) == (
            "finished: 3 steps in 4 min 12 s\n"
            "  evaluation      correct 0.375 -> 0.979 of 512 problems\n"
            f"  checkpoint      {tmp_path}/run/checkpoints/step-3\n"
            f"  Hugging Face    {tmp_path}/run/checkpoints/hf\n"
            f"  LoRA adapter    {tmp_path}/run/checkpoints/adapter\n"
            f"  learning curve  {tmp_path}/run/learning_curve.png\n"
            f"  timeline        {tmp_path}/run/timeline.json\n"
            f"  report          python -m rl.report {tmp_path}/run"
        )


def test_bottleneck_comes_last(tmp_path):
    step = {"step": 1, "time/step_s": 10.0, "time/score_s": 9.0, "time/train_s": 1.0}
    with RunFolder.create(tmp_path, "run") as folder:
        text = summary([step], folder=folder, run_s=1.0, config={"reward": {"num_procs": 1}})
    assert text.splitlines()[2:] == [
        "  bottleneck      Scoring takes 90% of a step: reward functions are slow; more processes "
        "score in parallel",
        "  would move it   --reward.num_procs 2",
    ]

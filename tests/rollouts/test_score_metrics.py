from rl.observability.metrics import merge, reduced
from rl.rollouts.score_metrics import score_metrics
from rl.types import Score


def score(unparsed=(), failure=None, **parts):
    return Score(reward=0.0, correct=False, parts=parts, failure=failure, unparsed=unparsed)


def numbers(*parts):
    return {name: reduced(metric) for name, metric in merge(parts).items()}


def test_each_function_is_a_mean_over_what_could_be_scored_and_the_rest_is_counted():
    scores = [
        score(answer=1.0, format=0.5),
        score(answer=0.0, format=0.5, unparsed=("answer", "format")),
        score(failure="it raised"),
    ]
    assert numbers(score_metrics(scores)) == {
        "reward/num_failed": 1,
        "reward/num_unparsed": 1,
        "reward/answer": 0.5,
        "reward/format": 0.5,
    }


def test_parts_of_any_size_merge_to_those_of_all():
    scores = [score(answer=float(i)) for i in range(5)]
    assert numbers(score_metrics(scores[:1]), score_metrics(scores[1:])) == numbers(score_metrics(scores))


def test_an_environment_that_gave_nothing_counts_as_0_where_another_gave_something():
    assert numbers(score_metrics([score(environment=1.0), score()]))["reward/environment"] == 0.5
    assert "reward/environment" not in score_metrics([score(), score()])


def test_a_function_does_not_replace_what_a_step_reports_anyway():
    metrics = numbers(score_metrics([score(std=2.0, num_failed=3.0)], prefix="eval"))
    assert metrics == {
        "eval/num_failed": 0,
        "eval/num_unparsed": 0,
        "eval/function_std": 2.0,
        "eval/function_num_failed": 3.0,
    }


def test_without_scores_there_is_nothing_but_the_counts():
    assert numbers(score_metrics([])) == {"reward/num_failed": 0, "reward/num_unparsed": 0}

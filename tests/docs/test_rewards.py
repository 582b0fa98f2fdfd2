"""Code of docs/rewards.md, executed."""

import asyncio
import re
from pathlib import Path
from typing import Any

from rl.rollouts.rubric import Rubric
from tests.support.scored import replied

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(), re.DOTALL
)


def run(block):
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def test_rubric_of_the_docs_scores_a_group():
    rubric = run(BLOCKS[0])["RUBRIC"]
    good, wrong, none = asyncio.run(
        rubric.score_group([replied("please: 21"), replied("20"), replied("I do not know")])
    )
    assert (good.reward, good.correct, good.unparsed) == (1.0 + 0.1 + 0.2, True, ())
    assert (wrong.reward, wrong.correct, wrong.unparsed) == (0.2, False, ())
    assert (none.reward, none.correct, none.unparsed) == (-0.1 + 0.2, False, ("answer",))


def test_judge_of_the_docs_reads_labels():
    names = run(BLOCKS[1])
    assert isinstance(names["RUBRIC"], Rubric)
    judge = names["JUDGE"]
    assert judge.prompt(replied("21")).startswith("Question: 47 82\n\nReply: 21\n\nIs the reply right?")
    assert [judge.grade.read(text) for text in ("It adds up.\nYes.", "no", "yes and no")] == [1.0, 0.0, None]

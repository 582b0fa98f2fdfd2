"""What replies share: a pattern alone is looked for as among all features of a reply."""

import random

from rl.reporting.rules.reward_patterns import Pattern, _features


def reply(rng):
    text = "".join(rng.choice("ab_1?. \n-é") for _ in range(rng.randrange(24)))
    return {"turns": [{"reply": text, "finish_reason": rng.choice(["stop", "length"])}]}


def test_a_pattern_is_in_the_replies_that_have_its_feature():
    rng = random.Random(1)
    num_found = 0
    for _ in range(150):
        one, other = reply(rng), reply(rng)
        features = _features(other)
        for of, parts in _features(one):
            pattern = Pattern(of=of, parts=parts, name="")
            assert pattern.is_in(one), (of, parts, one)
            assert pattern.is_in(other) == ((of, parts) in features), (of, parts, other)
            num_found += pattern.is_in(other)
    assert num_found > 100

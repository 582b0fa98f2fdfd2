import pytest

from rl.data.split import choose, content_key, is_held_out

KEYS = [content_key(f"question {i}") for i in range(4000)]


def test_key_is_of_the_words_and_not_of_the_spaces_between_them():
    assert content_key(" two  words\n") == content_key("two words")
    assert content_key("two words") != content_key("twowords")


def test_key_is_the_same_in_every_run():
    assert content_key("2 + 2 = ?") == 8487084148984385335


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_held_out_share_is_about_what_was_asked_for(share):
    held = sum(is_held_out(key, share=share) for key in KEYS)
    assert abs(held / len(KEYS) - share) < 3 * (share * (1 - share) / len(KEYS)) ** 0.5


def test_what_a_small_share_holds_out_a_larger_one_does_too():
    small = {key for key in KEYS if is_held_out(key, share=0.1)}
    assert small < {key for key in KEYS if is_held_out(key, share=0.2)}


def test_choice_is_in_order_and_follows_the_content_not_the_place():
    chosen = choose(KEYS, 40)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 40
    turned = KEYS[::-1]
    assert {turned[i] for i in choose(turned, 40)} == {KEYS[i] for i in chosen}


def test_choice_of_enough_or_all_is_all():
    assert choose([5, 3], 2) == choose([5, 3], None) == [0, 1]

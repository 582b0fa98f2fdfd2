import pytest

from tests.support.distributed import run_ranks
from tests.support.dying import die


@pytest.mark.medium
def test_signal_or_exit_status_of_a_dead_rank_is_told():
    for how, told in {"kill": "of SIGKILL", "exit": "with exit status 3"}.items():
        with pytest.raises(RuntimeError) as raised:
            run_ranks(die, 2, how, timeout_s=60)
        assert str(raised.value) == f"die: rank 1 died {told}"


@pytest.mark.medium
def test_stacks_of_a_rank_that_crashed_are_told():
    with pytest.raises(RuntimeError, match=r"^die: rank 1 died of SIGSEGV\n") as raised:
        run_ranks(die, 2, "crash", timeout_s=60)
    _, fault, *stacks = str(raised.value).splitlines()
    assert fault == "Fatal Python error: Segmentation fault"
    text = "\n".join(stacks)
    assert "in read_address_zero" in text
    assert "in _end_with_parent" in text  # another thread's

from rl.observability.process_state import Doing, Moment, ProcessState
from rl.observability.process_summary import rank_ranges, summarise
from rl.process_id import ProcessId


class At(Moment):
    """So many seconds ago, whenever it is asked."""

    def __init__(self, ago_s):
        object.__setattr__(self, "since", -ago_s)
        object.__setattr__(self, "since_monotonic_s", -ago_s)

    def ago_s(self, *, is_here):
        return -self.since


def state(role, rank, *doing, idle_s=0.0):
    return ProcessState(
        role=role,
        rank=rank,
        host="elsewhere",
        process=ProcessId(1, 1),
        policy_version=None,
        doing=tuple(Doing(what=what, num=num, version=v, since=At(ago)) for what, num, v, ago in doing),
        idle=At(idle_s),
        changed=At(0.0),
        failed=None,
    )


def lines(*states):
    return [(line.who, line.does, line.for_, line.is_idle) for line in summarise(states)]


def test_processes_of_a_role_that_do_the_same_are_one_line_with_the_longest_time():
    forward = ("forward_backward", 1, 3)
    assert lines(
        state("generator_0", 0, ("generate", 2, None, 1.0)),
        state("reward", 0, idle_s=7.0),
        state("trainer", 0, (*forward, 0.25)),
        state("trainer", 1, (*forward, 0.5)),
        state("trainer", 2, ("push", 1, 3, 0.1)),
        state("trainer", 3, (*forward, 0.3)),
    ) == [
        ("generator_0", "generate (2 times)", "1.0 s", False),
        ("reward", "waits to be asked", "7.0 s", True),
        ("trainer 0-1,3", "forward_backward of version 3", "0.5 s", False),
        ("trainer 2", "push of version 3", "0.1 s", False),
    ]


def test_of_many_activities_of_a_process_the_first_are_named():
    many = [(f"waits for {name}", 1, None, 2.0) for name in "abcde"]
    assert lines(state("controller", 0, *many)) == [
        ("controller", "waits for a, waits for b, waits for c and 2 more", "2.0 s", False)
    ]


def test_ranks_are_told_by_ranges():
    assert rank_ranges([3, 0, 1, 2, 5, 7, 8]) == "0-3,5,7-8"
    assert rank_ranges([4]) == "4"

from __future__ import annotations

import pytest

from rl.tinker.errors import GoneError, NotFoundError
from rl.tinker.service.names import Ids, parse_path


def test_every_id_under_a_session_is_its_owners_and_a_changed_one_nobodys():
    ids = Ids()
    session = ids.new_session("me")
    for one in (
        session,
        f"{session}:train:0",
        f"{session}:sample:12",
        f"{session}:train:3:44",
        f"{session}:train:3:unload",
    ):
        assert ids.check_session_of(one, "me") == session
        with pytest.raises(NotFoundError):
            ids.check_session_of(one, "you")
    last = "0" if session[-1] != "0" else "1"
    for one in (
        f"{session[:-1]}{last}",
        f"{session}:",
        f"{session}:train:",
        f"{session}:train:0:1:2",
        f"{session}\n",
    ):
        with pytest.raises(NotFoundError):
            ids.check_session_of(one, "me")


def test_ids_of_another_process_are_gone_for_everybody():
    session = Ids().new_session("me")
    with pytest.raises(GoneError, match="what was saved is still there"):
        Ids().check_session_of(session, "me")


def test_a_path_is_read_as_it_is_written():
    path = f"tinker://{Ids().new_session('me')}:train:7/sampler_weights/step-1"
    parsed = parse_path(path)
    assert (parsed.kind, parsed.name, str(parsed)) == ("sampler", "step-1", path)

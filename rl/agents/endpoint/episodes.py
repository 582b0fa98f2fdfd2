"""The episodes that are open at an endpoint, by their keys."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from rl.agents.endpoint.episode import AgentEpisode
from rl.agents.settings import ClientRules, EpisodeSettings
from rl.agents.types import RequestError
from rl.protocols import TokenGenerator
from rl.rollouts.renderer import Renderer
from rl.utils.pace import Pace

KEPT_KEYS = 65_536
"""Keys of ended episodes that are remembered, so that late requests are told of the end."""


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """Episodes that agents may call, all answered by one generator."""

    generator: TokenGenerator
    renderer: Renderer
    rules: ClientRules = field(default_factory=ClientRules)
    _pace: Pace = field(default_factory=Pace)
    _open: dict[str, AgentEpisode] = field(default_factory=dict)
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def open(self, settings: EpisodeSettings) -> AgentEpisode:
        """Open an episode with the key of its settings."""
        episode = AgentEpisode(
            generator=self.generator,
            renderer=self.renderer,
            settings=settings,
            rules=self.rules,
            pace=self._pace,
        )
        self._open[settings.key] = episode
        return episode

    def find(self, key: str) -> AgentEpisode:
        """Return an open episode; raise RequestError for a key that names none."""
        episode = self._open.get(key)
        if episode is not None:
            return episode
        if key in self._ended:
            raise RequestError("the episode has ended", status=409, code="episode_ended")
        raise RequestError(
            "the key names no episode: it must be sent as `Authorization: Bearer` or `x-api-key`, "
            "or be part of the URL",
            status=401,
            code="invalid_api_key",
        )

    def end(self, episode: AgentEpisode) -> None:
        """End an episode. Idempotent."""
        key = episode.settings.key
        if self._open.pop(key, None) is not None:
            episode.close()
            self._ended[key] = None
            if len(self._ended) > KEPT_KEYS:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """End all episodes."""
        for episode in list(self._open.values()):
            self.end(episode)

"""Dealer: decides which worker plays which episodes of an evaluation. Answers in, episodes out; no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable


class Dealer:
    """Deals every episode until it is over, and no episode to two players at a time.

    A player is dealt as many episodes as it has environments and, once its pace between two answers is known, some to
    go on with. Episodes it has not begun by its answer go back, so that no player idles while another has a queue.

    Attributes:
        num_left: How many episodes are not over.
        losses: How often each episode was dealt to a player that was then lost.
    """

    def __init__(self, episodes: Iterable[int], num_players: int, max_steps: int) -> None:
        """Deal these episodes.

        Args:
            episodes: Their indices, in the order in which to play them.
            num_players: How many players they are dealt to.
            max_steps: The longest an episode may be. Each advances by at least one step between two answers.
        """
        self._waiting = deque(episodes)
        self._num_players = num_players
        self._max_steps = max_steps
        self._held: dict[Hashable, dict[int, int]] = {}  # By episode, how many answers came while it was under way.
        self._pace: dict[Hashable, int] = {}
        self.num_left = len(self._waiting)
        self.losses: Counter[int] = Counter()

    def wants(self, player: Hashable) -> bool:
        """Whether there is anything for a player to do."""
        return bool(self._waiting or self._held.get(player))

    def deal(self, player: Hashable, num_envs: int) -> list[int]:
        """Return the episodes that a player with this many environments is to play besides those it has begun."""
        held = self._held.setdefault(player, {})
        ahead = min(2 * self._pace.get(player, 0), len(self._waiting) // (2 * self._num_players))
        count = max(0, min(len(self._waiting), num_envs + ahead - len(held)))
        dealt = [self._waiting.popleft() for _ in range(count)]
        held.update(dict.fromkeys(dealt, 0))
        return dealt

    def accept(self, player: Hashable, finished: Iterable[int], unstarted: Iterable[int]) -> None:
        """Take note of an answer.

        Raises:
            ValueError: It names an episode that the player was not dealt, or one twice, or an episode has taken more
                answers than it can have steps.
        """
        held = self._held.setdefault(player, {})
        finished, unstarted = list(finished), list(unstarted)
        for index in (*finished, *unstarted):
            if index not in held:
                raise ValueError(f"episode {index} is not among those it plays")
            del held[index]
        for index in held:
            held[index] += 1
            if held[index] >= self._max_steps:
                raise ValueError(f"episode {index} must be over after {self._max_steps} answers, and it is not")
        self._waiting.extendleft(reversed(unstarted))
        self._pace[player] = len(finished)
        self.num_left -= len(finished)

    def take_back(self, player: Hashable) -> None:
        """Note that a player is lost, so others must play what it was dealt."""
        held = sorted(self._held.pop(player, ()))
        self._waiting.extendleft(reversed(held))
        self._pace.pop(player, None)
        self.losses.update(held)

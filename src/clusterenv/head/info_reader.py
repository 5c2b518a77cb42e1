"""InfoReader: the infos of a step or reset, whichever way they come: beside the planes, or in a message."""

from __future__ import annotations

from typing import Any

from clusterenv.head.batch import ShardInfos, check_infos, merge_infos
from clusterenv.head.checks import checked_dict
from clusterenv.head.failure import blame
from clusterenv.head.hub import Hub
from clusterenv.head.roster import Member
from clusterenv.wire import values
from clusterenv.wire.info_planes import SlotReader
from clusterenv.wire.messages import Stepped
from clusterenv.wire.planes import Planes


class InfoReader:
    """Reads the infos that workers return."""

    def __init__(self, hub: Hub, planes: Planes) -> None:
        self._hub = hub
        self._num_envs = len(planes.rewards)
        shards = [(member.start, member.stop) for member in hub.members]
        self._slots = SlotReader(planes.info_slots, shards, hub.desks.find_names)

    def read(self, member: Member, stepped: Stepped) -> dict[str, Any]:
        """Return the infos that go with one worker's answer.

        Raises:
            WireError: They are not in Gymnasium's vector layout.
        """
        if stepped.generation:
            return self._slots.read(member.index, stepped.generation)
        infos = {} if stepped.infos is None else values.loads(stepped.infos)
        check_infos(infos, member.stop - member.start)
        return checked_dict(infos)

    def read_plain(self) -> dict[str, Any]:
        """Return the infos of all environments, after a plain step with plain answers.

        Raises:
            WireError: A worker has not written down what they are called.
        """
        generations = self._hub.generations
        if not any(generations):
            return {}
        infos = self._slots.read_all(generations)
        if infos is not None:
            return infos
        shards = []
        for member, generation in zip(self._hub.members, generations, strict=True):
            if generation:
                with blame(member):
                    shards.append(ShardInfos(member.start, member.stop, self._slots.read(member.index, generation)))
        return merge_infos(shards, self._num_envs)

"""Places: where workers run while they are harmed, and what can befall them there and nowhere else.

`local` is the head's own machine. `hosts` are network namespaces, each worker behind a link of its own. `slurm`,
`kubernetes` and `ray` are real ones, their nodes network namespaces too. All but the first need root; Slurm's programs
come with `scripts/install_infrastructure`, and Kubernetes with the test bed beside the project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from chaos.places.hosts import open_hosts
from chaos.places.kubernetes import open_kubernetes
from chaos.places.local import open_local
from chaos.places.place import Place
from chaos.places.ray import open_ray
from chaos.places.slurm import open_slurm

PLACES: Mapping[str, Callable[[str, int], AbstractContextManager[Place]]] = {
    "local": open_local,
    "hosts": open_hosts,
    "slurm": open_slurm,
    "kubernetes": open_kubernetes,
    "ray": open_ray,
}

"""Which checkpoints a model of this process continues, so that no run writes over another's."""

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from sb3_td3x.checkpoint.store import Checkpoint, Store
from sb3_td3x.common.resumable import Resumable
from sb3_td3x.errors import CheckpointError


@dataclass
class Lineage:
    """
    A model's place in a folder of checkpoints.

    :param taken_up_at: number of the folder's newest checkpoint when the model was made from one of them; 0 for a new run
    :param writer: marks the checkpoints that are made from this model
    :param last: the one that the model was made from or was last saved as
    """

    taken_up_at: int = 0
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    last: Checkpoint | None = None

    def require_newest(self, store: Store) -> None:
        """
        :raises CheckpointError: if another run, or a process that took this one over, has saved in the folder since
        """
        for newest in store.checkpoints()[-1:]:
            if newest.number > self.taken_up_at and newest.manifest.get("writer") != self.writer:
                problem = f"holds {newest.path.name}, which this run did not save"
                raise CheckpointError(store.folder, f"{problem}: use a folder per run, or go on with resume_run")


_lineages: WeakKeyDictionary[Resumable, dict[Path, Lineage]] = WeakKeyDictionary()


def of(model: Resumable, store: Store) -> Lineage:
    return _lineages.setdefault(model, {}).setdefault(store.folder, Lineage())


def take_up(model: Resumable, store: Store, found: Checkpoint) -> None:
    """Remember that a model was made from a checkpoint."""
    _lineages.setdefault(model, {})[store.folder] = Lineage(store.checkpoints()[-1].number, last=found)

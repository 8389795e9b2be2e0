"""The measured links between members: kept on the controller by `shoal bench links`, read by every `up`."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Document, File
from shoal.network.links import LINKS
from shoal.roles.part import How, Part


class Links(Part):
    """Nothing has to be there. Where something was measured, Slurm's topology may come of it."""

    files: Mapping[str, How] = {LINKS: "text"}

    def farewell(self) -> Document:
        return (File(LINKS),)

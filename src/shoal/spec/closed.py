"""What every model of the file is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Closed(BaseModel):
    """Frozen, and refuses unknown keys. The text under a field describes it, and `docs.py` reads it when asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

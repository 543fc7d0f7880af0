"""The base of all records of a report."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen record of the report; unknown fields are errors, and a value that is not finite never enters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""`shoal schema`: a JSON Schema of shoal.yaml, with which an editor completes and checks the file."""

from __future__ import annotations

import json

from shoal.spec.docs import schema


def schema_text() -> str:
    """The schema as JSON text, ready to be saved beside the file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"

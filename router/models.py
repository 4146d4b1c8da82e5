"""The model list of /v1/models: one served model, in OpenAI's shape with the length limit users of vLLM look for.

Says what is served, not whether it can be served right now; that is /readyz. Pure; times are wall seconds.
"""

from __future__ import annotations

from typing import Any


def model_object(name: str, created: int, limit_tokens: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "baton", "max_model_len": limit_tokens}


def model_list(name: str, created: int, limit_tokens: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(name, created, limit_tokens)]}

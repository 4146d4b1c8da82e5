"""The OpenAPI description of the HTTP surface, built from the same pydantic models that requests are parsed with.

Handlers read their bodies themselves (bounded, and with OpenAI's error shape), so FastAPI is told here what a body looks like. Pure.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route: a required JSON body of this model."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(document: dict[str, Any], models: list[type[BaseModel]]) -> dict[str, Any]:
    """Puts the models, and whatever they refer to, where the bodies' references point."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
    return document

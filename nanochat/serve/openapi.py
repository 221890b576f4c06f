"""The interface as an OpenAPI 3.1 page, made from the routes and from the classes that read requests."""
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from nanochat.serve.openai_api import IGNORED, NEUTRAL, BaseRequest

ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"]}}}


def describe(
    routes: Sequence[Route], bodies: Mapping[str, type[BaseModel] | dict], models: Sequence[str],
    defaults: Sequence[str],
) -> dict[str, Any]:
    """
    bodies: path → what its POST reads, as a class or as a schema. models: their names. defaults: parameters of a
    request for which the server has values of its own.
    """
    classes = [body for body in bodies.values() if not isinstance(body, dict)]
    refs, schemas = models_json_schema(
        [(body, "validation") for body in classes], ref_template="#/components/schemas/{model}")
    for body in classes:
        schema = schemas["$defs"][body.__name__]
        schema["properties"]["model"] = {"enum": models}
        accept_null(schema, defaults, issubclass(body, BaseRequest))
    paths = {}
    for route in routes:
        [method] = route.methods - {"HEAD"}
        kinds = ["application/json", "text/event-stream"] if method == "POST" else ["*/*"]
        answers = {"200": {"description": "an answer", "content": {kind: {} for kind in kinds}},
                   "default": {"description": "an error", "content": {"application/json": {"schema": ERROR}}}}
        names = [{"name": name, "in": "path", "required": True, "schema": {"enum": models}}
                 for name in route.param_convertors]
        operation = {"parameters": names, "responses": answers}
        if method == "POST":
            body = bodies[route.path]
            if isinstance(body, dict):
                schema = body | {"properties": body["properties"] | {"model": {"enum": models}}}
            else:
                schema = refs[body, "validation"]
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[route.path] = {method.lower(): operation}
    info = {"title": "nanochat", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas["$defs"]}}


def accept_null(schema: dict[str, Any], defaults: Sequence[str], refuses_unknown: bool) -> None:
    """Complete a request's schema with what is not in the class: null is a default; values that ask for nothing."""
    required = [name for name in schema.get("required", []) if name not in defaults]
    known = {name: {} for name in sorted(IGNORED)} | {name: {"enum": values} for name, values in NEUTRAL.items()}
    properties = (known if refuses_unknown else {}) | schema["properties"]
    schema |= {
        "required": required, "additionalProperties": not refuses_unknown,
        "properties": {name: each if name in required else {"anyOf": [each, {"type": "null"}]}
                       for name, each in properties.items()}}

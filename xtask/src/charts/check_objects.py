"""Prints each object that its CustomResourceDefinition refuses."""
import json
import sys

import jsonschema


def closed(schema):
    """The schema, with unknown fields refused unless it keeps them."""
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    keeps = schema.pop("x-kubernetes-preserve-unknown-fields", False)
    for field in ("properties",):
        if field in schema:
            schema[field] = {k: closed(v) for k, v in schema[field].items()}
    for field in ("items", "additionalProperties"):
        if isinstance(schema.get(field), dict):
            schema[field] = closed(schema[field])
    if "properties" in schema and "additionalProperties" not in schema and not keeps:
        schema["additionalProperties"] = False
    return schema


data = json.load(open(sys.argv[1]))
schemas = {}
for definition in data["definitions"]:
    spec = definition["spec"]
    for version in spec["versions"]:
        schema = closed(version["schema"]["openAPIV3Schema"])
        for field in ("apiVersion", "kind", "metadata"):
            schema.setdefault("properties", {}).setdefault(field, {})
        # A definition may check the name alone; the other fields are those of every object.
        schema["properties"]["metadata"].pop("additionalProperties", None)
        schemas[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
for one in data["objects"]:
    found = one["object"]
    schema = schemas.get((found["apiVersion"], found.get("kind")))
    if schema is None:
        continue  # an object that agents read from files only
    for error in jsonschema.Draft7Validator(schema).iter_errors(found):
        print(f"{one['file']}: {found['kind']}: {error.json_path}: {error.message}")

"""Two hundred JSON schemas, from trivial to recursive, all of which are enforced whole."""

from typing import Any

type Schema = dict[str, Any]

SHORT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def closed(required: bool = True, **properties: Any) -> Schema:
    """An object with these properties and no others."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": list(properties)} if required else schema


def array(items: Any, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


TRIVIAL: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -99, "maximum": 99},
    {"type": "number", "minimum": 0, "maximum": 1},
    SHORT,
    {"type": "string", "maxLength": 0},
    {"type": "array", "maxItems": 0},
    {"type": "object", "maxProperties": 0},
    {"type": "object", "additionalProperties": False},
    {"const": None},
    {"const": 17},
    {"const": -3.5},
    {"const": 'a "quoted" text\nwith two lines'},
    {"const": True},
    {"const": []},
    {"const": [1, "a", None]},
    {"const": {}},
    {"const": {"a": {"b": [1]}}},
    {"const": "ünïcödé 😀"},
    {"title": "A digit", "description": "from 0 to 9", "default": 3, "examples": [1], **DIGIT},
]

ENUMS: list[Schema] = [
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2, 3]},
    {"enum": [None, False, 0, "", [], {}]},
    {"enum": ["a"]},
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"enum": ["é", "è", "ê"]},
    {"enum": [1.5, 2.25, -0.125]},
    {"enum": [{"a": 1}, {"a": 2}]},
    {"enum": [[1, 2], [3]]},
    {"enum": ["x" * count for count in range(1, 20)]},
    {"type": "string", "enum": ["on", "off"]},
    {"type": "integer", "enum": [10, 20, 30]},
    {"enum": ["with space", "with\ttab", 'with \\ and "']},
    {"enum": [f"option {number}" for number in range(100)]},
    closed(mode={"enum": ["fast", "slow"]}),
    closed(mode={"enum": ["fast", "slow"]}, level={"enum": [1, 2]}),
    array({"enum": ["cat", "dog", "fox"]}, minItems=1),
    array({"enum": [0, 1]}, 8, minItems=8),
    {"enum": [True, "true", 1]},
    {"enum": ["A" * 200]},
]

NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": 5, "maximum": 5},
    {"type": "integer", "minimum": 0, "maximum": 1000000},
    {"type": "integer", "minimum": -17, "maximum": -13},
    {"type": "integer", "minimum": -5, "maximum": 12345},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 365},
    {"type": "integer", "minimum": 1, "maximum": 12},
    {"type": "number", "minimum": -1.5, "maximum": 2.5},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 99.9, "maximum": 100.1},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
    {"type": ["integer", "string"], "minimum": 1, "maximum": 3, "maxLength": 3},
    {"type": "integer", "minimum": 1900, "maximum": 2100},
    closed(x={"type": "number", "minimum": 0, "maximum": 9}, y={"type": "number", "minimum": 0, "maximum": 9}),
    closed(latitude={"type": "number", "minimum": -90, "maximum": 90}),
    array({"type": "number", "minimum": 0, "maximum": 1}, 4, minItems=2),
    {"type": "integer", "minimum": 2147483647, "maximum": 2147483649},
]

STRINGS: list[Schema] = [
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 20},
    {"type": "string", "pattern": "^[a-z]{1,8}$"},
    {"type": "string", "pattern": "^[A-Z][a-z]{0,10}$"},
    {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    {"type": "string", "pattern": "^(cat|dog|fox)s?$"},
    {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    {"type": "string", "pattern": "^a+b$", "maxLength": 9},
    {"type": "string", "pattern": "^(a|b|ab){1,5}$"},
    {"type": "string", "pattern": "cat", "maxLength": 9},
    {"type": "string", "pattern": "^x", "maxLength": 5},
    {"type": "string", "pattern": "y$", "maxLength": 5},
    {"type": "string", "pattern": r"^[^\s\"]{2,4}$"},
    {"type": "string", "pattern": "^(ab?c*){1,3}$", "maxLength": 12},
    {"type": "string", "pattern": r"^\w{1,5}@\w{1,5}\.(com|org)$"},
    {"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"},
    {"type": "string", "pattern": "^[éèê]{2}$"},
    {"type": "string", "pattern": "^(|a|aa)$"},
    {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[xyz]*$"},
    {"type": "string", "pattern": r"^\(\d\)\[\d\]\{\d\}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email", "maxLength": 40},
    closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    closed(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"}),
    array({"type": "string", "pattern": "^[01]{4}$"}, 4, minItems=1),
    closed(name={"type": "string", "minLength": 1, "maxLength": 8}, note=SHORT),
]

OBJECTS: list[Schema] = [
    closed(a=DIGIT),
    closed(a=DIGIT, b=DIGIT),
    closed(False, a=DIGIT, b=DIGIT, c=DIGIT),
    closed(**dict.fromkeys("abcdefghij", DIGIT)),
    closed(False, **dict.fromkeys("abcdefghij", DIGIT)),
    {"type": "object", "properties": {"a": DIGIT, "b": SHORT}, "required": ["b"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a"],
        "additionalProperties": DIGIT,
        "maxProperties": 3,
    },
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    {"type": "object", "additionalProperties": SHORT, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^n[0-9]$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^a[0-9]$": DIGIT, "^b[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    closed(outer=closed(inner=closed(core=DIGIT))),
    closed(left=closed(x=DIGIT), right=closed(x=DIGIT)),
    closed(**{"a b": DIGIT, 'c"d': DIGIT, "é": DIGIT, "": DIGIT}),
    closed(flag={"type": "boolean"}, value={"type": ["null", "boolean"]}),
    closed(first=SHORT, last=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    closed(status={"const": "ok"}, code={"const": 200}),
    closed(items=array(closed(id=DIGIT, name=SHORT), 2)),
    {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a", "z"],
        "additionalProperties": DIGIT,
        "maxProperties": 2,
    },
    {"type": ["object", "null"], "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
    closed(a={"type": "object", "additionalProperties": False}),
    closed(deep=closed(a=closed(b=closed(c=closed(d=closed(e=DIGIT)))))),
    {"properties": {"a": DIGIT}, "required": ["a"], "type": "object", "additionalProperties": False, "title": "T"},
    closed(text={"type": "string", "maxLength": 12, "description": 'with { and } and " in it'}),
    closed(False, optional=SHORT),
    closed(price={"type": "number", "minimum": 0, "maximum": 9.99}, currency={"enum": ["EUR", "USD"]}),
    closed(
        when={"type": "string", "format": "date"},
        where=closed(city=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    ),
    closed(matrix=array(array(DIGIT, 2, minItems=2), 2, minItems=2)),
    {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {"a": DIGIT},
        "additionalProperties": False,
    },
    closed(**{f"property_{number}": {"type": "boolean"} for number in range(12)}),
]

ARRAYS: list[Schema] = [
    array(DIGIT),
    array(DIGIT, 5, minItems=5),
    array(DIGIT, 1, minItems=1),
    array(SHORT, 2),
    array({"type": "boolean"}, 10, minItems=3),
    array({"type": "null"}, 4),
    array(array(DIGIT, 2), 2),
    array(array(array(DIGIT, 1), 1), 1),
    array(closed(a=DIGIT), 2, minItems=2),
    array({"anyOf": [DIGIT, SHORT]}, 3),
    {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False},
    {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [DIGIT], "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": "a"}, {"const": "b"}], "minItems": 2, "maxItems": 2},
    {"type": ["array", "null"], "items": DIGIT, "maxItems": 2},
    closed(tags=array(SHORT, 3), scores=array(DIGIT, 3)),
    closed(points=array(array({"type": "number", "minimum": 0, "maximum": 1}, 2, minItems=2), 2)),
    array({"enum": [[1], [2]]}, 2),
    array({"const": {"x": 1}}, 2, minItems=1),
    array(array(closed(a=DIGIT, b=array(DIGIT, 1)), 1), 2),
]

UNIONS: list[Schema] = [
    {"anyOf": [{"type": "null"}, DIGIT]},
    {"anyOf": [SHORT, DIGIT, {"type": "boolean"}]},
    {"anyOf": [closed(kind={"const": "a"}, x=DIGIT), closed(kind={"const": "b"}, y=SHORT)]},
    {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    {"oneOf": [closed(kind={"const": "a"}, x=DIGIT), closed(kind={"const": "b"}, y=SHORT)]},
    {"anyOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
    {"anyOf": [array(DIGIT), SHORT]},
    {"anyOf": [closed(a=DIGIT), array(DIGIT)]},
    closed(value={"anyOf": [DIGIT, {"type": "null"}]}),
    closed(value={"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 3}]}),
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"allOf": [closed(a=DIGIT)]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"type": "object", "properties": {"b": DIGIT}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    {"type": "integer", "anyOf": [{"minimum": 0, "maximum": 3}, {"minimum": 10, "maximum": 13}]},
    {"type": ["string", "integer", "null"], "maxLength": 4, "minimum": 0, "maximum": 9},
    {"type": ["boolean", "null"]},
    {"anyOf": [{"anyOf": [DIGIT, {"type": "null"}]}, {"anyOf": [SHORT, {"type": "boolean"}]}]},
    array({"oneOf": [DIGIT, {"type": "boolean"}]}, 4, minItems=2),
    closed(a={"anyOf": [closed(x=DIGIT), closed(y=DIGIT)]}, b={"anyOf": [{"const": 1}, {"const": "1"}]}),
    {"anyOf": [{"type": "string", "pattern": "^a{1,3}$"}, {"type": "string", "pattern": "^b{1,3}$"}]},
    {"anyOf": [{"const": "yes"}, {"const": "no"}, {"const": "maybe"}]},
    {"anyOf": [closed(a=DIGIT), closed(a=DIGIT, b=DIGIT), closed(a=DIGIT, b=DIGIT, c=DIGIT)]},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    closed(result={"anyOf": [closed(ok={"const": True}, value=DIGIT), closed(ok={"const": False}, error=SHORT)]}),
]

# Every one of these may go on for ever, but a short text satisfies it.
REFERENCES: list[Schema] = [
    {"$ref": "#/$defs/digit", "$defs": {"digit": DIGIT}},
    {"$ref": "#/definitions/digit", "definitions": {"digit": DIGIT}},
    closed(a={"$ref": "#/$defs/short"}, b={"$ref": "#/$defs/short"}) | {"$defs": {"short": SHORT}},
    array({"$ref": "#/$defs/pair"}, 2) | {"$defs": {"pair": closed(x=DIGIT, y=DIGIT)}},
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed(value=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": closed(label={"enum": ["a", "b"]}, children=array({"$ref": "#/$defs/tree"}, 2))},
    },
    {"anyOf": [DIGIT, array({"$ref": "#"}, 2)]},
    closed(name=SHORT, child={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": DIGIT}},
    {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": {"anyOf": [{"type": "null"}, closed(odd={"$ref": "#/$defs/odd"})]},
            "odd": closed(even={"$ref": "#/$defs/even"}),
        },
    },
    {
        "$ref": "#/$defs/expression",
        "$defs": {
            "expression": {
                "anyOf": [
                    DIGIT,
                    closed(
                        op={"enum": ["+", "-"]},
                        left={"$ref": "#/$defs/expression"},
                        right={"$ref": "#/$defs/expression"},
                    ),
                ]
            }
        },
    },
    closed(a={"$ref": "#/properties/b"}, b=DIGIT),
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": DIGIT}},
    {"$ref": "#/$defs/with%20space", "$defs": {"with space": DIGIT}},
    {"$defs": {"unused": {"type": "string"}}, **DIGIT},
]

REAL: list[Schema] = [
    closed(
        name={"type": "string", "minLength": 1, "maxLength": 10},
        email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.com$"},
        age={"type": "integer", "minimum": 18, "maximum": 99},
        roles=array({"enum": ["admin", "user", "guest"]}, 2, minItems=1),
        address=closed(street=SHORT, city=SHORT, zip={"type": "string", "pattern": "^\\d{5}$"}),
    ),
    closed(
        function={"enum": ["get_weather", "get_time"]},
        arguments=closed(city={"enum": ["Paris", "Rome"]}, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    closed(
        sentiment={"enum": ["positive", "neutral", "negative"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    closed(steps=array(closed(explanation=SHORT, output=SHORT), 2, minItems=1), final_answer=SHORT),
    closed(
        id={"type": "string", "format": "uuid"},
        created={"type": "string", "format": "date-time"},
        total={"type": "number", "minimum": 0, "maximum": 1000},
        lines=array(closed(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{3}$"}, quantity=DIGIT), 2),
    ),
    closed(
        type={"const": "FeatureCollection"},
        features=array(
            closed(
                type={"const": "Feature"},
                geometry=closed(
                    type={"const": "Point"},
                    coordinates=array({"type": "number", "minimum": 0, "maximum": 9}, 2, minItems=2),
                ),
            ),
            1,
        ),
    ),
    closed(
        title=SHORT, ingredients=array(closed(name=SHORT, grams={"type": "integer", "minimum": 1, "maximum": 999}), 2)
    ),
    closed(answer={"type": "boolean"}, reason={"type": "string", "maxLength": 20}),
    closed(entities=array(closed(text=SHORT, label={"enum": ["PERSON", "PLACE"]}, start=DIGIT, end=DIGIT), 2)),
    closed(
        thought={"type": "string", "maxLength": 10},
        action={
            "anyOf": [
                closed(tool={"const": "search"}, query=SHORT),
                closed(tool={"const": "finish"}, answer=SHORT),
            ]
        },
    ),
    closed(rows=array(array({"anyOf": [DIGIT, {"type": "null"}]}, 3, minItems=3), 2)),
    closed(
        host={"type": "string", "format": "ipv4"},
        port={"type": "integer", "minimum": 1, "maximum": 65535},
        tls={"type": "boolean"},
    ),
    closed(board=array(array({"enum": ["X", "O", " "]}, 3, minItems=3), 3, minItems=3), turn={"enum": ["X", "O"]}),
    closed(
        question=SHORT, options=array(SHORT, 4, minItems=4), correct={"type": "integer", "minimum": 0, "maximum": 3}
    ),
    closed(red={"$ref": "#/$defs/byte"}, green={"$ref": "#/$defs/byte"}, blue={"$ref": "#/$defs/byte"})
    | {"$defs": {"byte": {"type": "integer", "minimum": 0, "maximum": 255}}},
    closed(
        version={"const": "2.0"},
        method={"enum": ["sum", "echo"]},
        params=array(DIGIT, 3),
        id={"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    ),
    closed(verdict={"enum": ["accept", "reject"]}, scores=closed(False, clarity=DIGIT, depth=DIGIT, style=DIGIT)),
    closed(
        start={"type": "string", "format": "time"},
        end={"type": "string", "format": "time"},
        room={"type": "string", "pattern": "^[A-C][0-9]{2}$"},
    ),
    closed(language={"enum": ["en", "de", "fr"]}, translation={"type": "string", "maxLength": 15}),
    closed(a=array(closed(b=array(closed(c=array(DIGIT, 1)), 1)), 1)),
]

CASES: list[Schema] = [*TRIVIAL, *ENUMS, *NUMBERS, *STRINGS, *OBJECTS, *ARRAYS, *UNIONS, *REFERENCES, *REAL]

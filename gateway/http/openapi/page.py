"""The OpenAPI document as a page for people: made on the server, without a script and without a file from elsewhere."""

from html import escape

from engines.engine import Json

_STYLE = """
:root { color-scheme: light dark; --soft: light-dark(#5d6878, #97a3b4); --line: light-dark(#dde2e9, #2c3542); }
body { max-width: 1000px; margin: 0 auto; padding: 20px; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin: 28px 0 0; } h2 + p { margin: 0 0 8px; color: var(--soft); }
details { border-top: 1px solid var(--line); padding: 7px 0; } summary { cursor: pointer; }
code { font: 13px ui-monospace, monospace; } .key { color: var(--soft); float: right; margin-left: 14px; }
table { border-collapse: collapse; margin: 8px 0 4px 18px; } td { padding: 2px 14px 2px 0; vertical-align: top; }
"""
_NO_KEY = "no key"


def docs_page(document: Json) -> bytes:
    """Draw the document: a section for each tag, a line for each operation, its fields when opened."""
    info = document["info"]
    sections = "".join(_section(document, tag) for tag in document["tags"])
    intro = (
        f"<p>{escape(info['description'])} Keys go into <code>Authorization: Bearer KEY</code>; trusted networks need "
        'none. <a href="/openapi.json">openapi.json</a> is the same for programs, '
        '<a href="/dashboard">/dashboard</a> shows the fleet.</p>'
    )
    return _html(f"{info['title']} {info['version']}: routes", intro + sections)


def start_page(version: str) -> bytes:
    """Draw the page at the root of the rollout URL."""
    links = {
        "/dashboard": "the fleet: states, versions, load, updates, events",
        "/docs": "every route of this URL",
        "/openapi.json": "the same for programs",
        "/health": "up or not",
        "/metrics": "figures for Prometheus",
    }
    rows = "".join(f'<tr><td><a href="{path}">{path}</a></td><td>{text}</td></tr>' for path, text in links.items())
    return _html(
        f"rollout-gateway {version}",
        "<p>One URL in front of inference engines for RL rollouts. Trainers and OpenAI clients take this address as "
        f"their server.</p><table>{rows}</table>",
    )


def _html(title: str, content: str) -> bytes:
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><link rel=icon href=data:,>"
    return f"{head}<style>{_STYLE}</style><h1>{escape(title)}</h1>{content}</html>".encode()


def _section(document: Json, tag: Json) -> str:
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if tag["name"] in operation["tags"]
    )
    return f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p>{operations}"


def _operation(method: str, path: str, operation: Json) -> str:
    word = "ANY" if "x-any-method" in operation else method.upper()
    key = " or ".join(name for scheme in operation.get("security", ()) for name in scheme) or _NO_KEY
    head = f"<code><b>{word}</b> {escape(path)}</code> {escape(operation['summary'])}"
    about = f"<p>{escape(operation['description'])}</p>" if "description" in operation else ""
    fields = about + _parameters(operation) + _body(operation)
    return f"<details><summary><span class=key>{escape(key)}</span>{head}</summary>{fields}</details>"


def _parameters(operation: Json) -> str:
    rows = [
        (parameter["name"], f"{parameter['in']}, {_type(parameter['schema'])}", parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    return _table(rows)


def _body(operation: Json) -> str:
    if "requestBody" not in operation:
        return ""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    required = schema.get("required", ())
    return _table(
        [
            (name, f"{_type(field)}{', required' if name in required else ''}", field["description"])
            for name, field in schema["properties"].items()
        ]
    )


def _type(schema: Json) -> str:
    found = schema["type"]
    return found if isinstance(found, str) else " or ".join(found)


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(meaning)}</td></tr>"
        for name, kind, meaning in rows
    )
    return f"<table>{lines}</table>" if lines else ""

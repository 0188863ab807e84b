"""The Serve deploy document of a configuration, for `serve deploy` and for `rollout-gateway up`."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engines.config import is_reference
from engines.errors import ConfigError
from gateway.config.schema import Config

_IMPORT_PATH = "gateway.app:build"


def serve_config(config: Config) -> dict[str, Any]:
    """Build the document. Serve shows it to everybody, so raise `ConfigError` for a key that is written out."""
    serve = config.serve
    return {
        "proxy_location": serve.proxy_location,
        "http_options": {"host": serve.http_host, "port": serve.http_port},
        "applications": [
            {
                "name": config.name,
                "route_prefix": "/",
                "import_path": _IMPORT_PATH,
                "args": _args(config),
            }
        ],
    }


def config_of(application: Mapping[str, Any]) -> Config:
    """Return the configuration in a deployed application's document.

    Raises `ConfigError` for that of another release, whose keys this one does not take, and of other applications.
    """
    try:
        return Config.model_validate(application.get("args") or {})
    except ValidationError as error:
        name, wrong = application.get("name"), error.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(
            f"{name} runs with a configuration that this release does not take ({key}: {wrong['msg']}), so another "
            f"release deployed it; first run: rollout-gateway down --name {name}"
        ) from None


def _args(config: Config) -> dict[str, Any]:
    for name in ("inference_keys", "admin_keys"):
        if not all(map(is_reference, getattr(config.gateway, name))):
            raise ConfigError(
                f"gateway.{name} has a key that is written out, and Serve would show it to everybody: name it as "
                "env:NAME or file:PATH, which the gateway's node reads"
            )
    args = config.model_dump(mode="json", exclude_defaults=True)
    if config.engines:
        # Each group carries all it took over; given again, a group's return to a default would be lost.
        args.pop("engine", None)
        # A group may be nothing but defaults.
        args["engines"] = {name: args["engines"].get(name, {}) for name in config.engines}
    return args

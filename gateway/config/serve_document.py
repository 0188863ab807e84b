"""The Serve deploy document of a configuration, for `serve deploy` and for `rollout-gateway up`."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engines.config import KEY_REFERENCES, is_reference
from engines.errors import ConfigError
from gateway.config.schema import Config
from gateway.config.sources import PREFIX

_IMPORT_PATH = "gateway.app:build"
KEY_LISTS = ("inference_keys", "admin_keys")
ENVIRONMENT_REFERENCES = {name: f"env:{PREFIX}GATEWAY__{name.upper()}" for name in KEY_LISTS}


def serve_config(config: Config, references: Mapping[str, str] = ENVIRONMENT_REFERENCES) -> dict[str, Any]:
    """Build the document without a key in it: Serve shows the document to everybody.

    Keys written out in `config` are replaced by `references`, from which the gateway's builder reads them: `env:NAME`
    or `file:PATH`, by the name of their list.
    """
    serve = config.serve
    return {
        "proxy_location": serve.proxy_location,
        "http_options": {"host": serve.http_host, "port": serve.http_port},
        "applications": [
            {
                "name": config.name,
                "route_prefix": "/",
                "import_path": _IMPORT_PATH,
                "args": _args(config, references),
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


def written_out_keys(config: Config) -> dict[str, list[str]]:
    """Return keys that are written out in the configuration, by the name of their list."""
    lists = {name: getattr(config.gateway, name) for name in KEY_LISTS}
    return {name: [key.get_secret_value() for key in keys if not is_reference(key)] for name, keys in lists.items()}


def _args(config: Config, references: Mapping[str, str]) -> dict[str, Any]:
    args = config.model_dump(mode="json", exclude_defaults=True)
    if config.engines:
        # Each group carries all it took over; given again, a group's return to a default would be lost.
        args.pop("engine", None)
        # A group may be nothing but defaults.
        args["engines"] = {name: args["engines"].get(name, {}) for name in config.engines}
    for name, keys in written_out_keys(config).items():
        if keys:
            kept = [key for key in args["gateway"][name] if key.startswith(KEY_REFERENCES)]
            args["gateway"][name] = [*kept, references[name]]
    return args

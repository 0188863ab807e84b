"""The models behind one URL: the policy, whose weights a trainer updates, and frozen ones beside it (a judge, a
reference model)."""

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

from engines.config import EngineConfig
from engines.errors import ConfigError, DeadlineExceeded, InvalidRequest, UnknownModel, shown
from engines.types import ReplicaInfo


class Models:
    """The model of each engine group. At most one model is not frozen: the policy.

    A group whose server alone knows its model (kind: external without `model`) has no name until it joins.
    `policy` is None where every model is frozen, and until its name is known.
    """

    def __init__(self, groups: Mapping[str, EngineConfig]) -> None:
        """Raises `ConfigError` where the groups do not fit together."""
        self._groups = groups
        self._know({name: group.served_name for name, group in groups.items()})

    @property
    def groups(self) -> Mapping[str, EngineConfig]:
        """Engine groups by name."""
        return self._groups

    @property
    def names(self) -> list[str]:
        """Known models, the policy first: trainers and benchmarks take the first of a list for theirs."""
        return list(self._known)

    @property
    def first(self) -> str:
        """The policy; where all are frozen, the first of them. Raises `DeadlineExceeded` while no name is known."""
        if self.policy is not None:
            return self.policy
        if self.all_frozen and (names := self.names):
            return names[0]
        raise DeadlineExceeded(f"the model to take is not known yet{self._not_yet_known()}")

    @property
    def all_frozen(self) -> bool:
        return all(group.frozen for group in self._groups.values())

    def is_frozen(self, group: str) -> bool:
        return self._groups[group].frozen

    def join(self, info: ReplicaInfo) -> None:
        """Note the model of a replica. Raises `ConfigError` where it contradicts the configuration."""
        configured = self._groups[info.group].served_name
        if configured not in ("", info.model):
            raise ConfigError(
                f"engines.{info.group} is to serve {configured!r}, but this replica serves {info.model!r}"
            )
        self._know({**self._names, info.group: info.model})

    def asked(self, model: Any) -> str:
        """Resolve the model of a request. A request without one means the policy, or the only model.

        Raises `UnknownModel`, `InvalidRequest` where it has to name one, `DeadlineExceeded` as `first` does.
        """
        names = self._known
        if model in names:
            return str(model)
        if model is not None:
            raise UnknownModel(
                f"model {shown(model)} is not served here; "
                f"there is {', '.join(names) or 'none'}{self._not_yet_known()}",
                param="model",
            )
        if self.all_frozen and len(names) > 1:
            raise InvalidRequest(
                f"model is missing, and there is no policy, since all are frozen: name one of {', '.join(names)}",
                param="model",
            )
        return self.first

    def _not_yet_known(self) -> str:
        groups = ", ".join(group for group, name in self._names.items() if not name)
        return f" (engine group {groups} has not joined, so its model is not known: see /health)" if groups else ""

    def _know(self, names: Mapping[str, str]) -> None:
        """Take the names of the models by group. They are asked for at each request, and change when a group joins."""
        self._check(names)
        policy = next((name for group, name in names.items() if name and not self.is_frozen(group)), None)
        self._names, self.policy = names, policy
        self._known = sorted({name for name in names.values() if name}, key=lambda name: (name != policy, name))

    def _check(self, names: Mapping[str, str]) -> None:
        frozen = {group: name for group, name in names.items() if name and self.is_frozen(group)}
        trained = {group: name for group, name in names.items() if name and not self.is_frozen(group)}
        for (one, model), (other, others_model) in combinations(trained.items(), 2):
            if model != others_model:
                raise ConfigError(
                    f"engines.{one} serves {model!r} and engines.{other} serves {others_model!r}, but one model alone "
                    "can be the policy that a trainer updates: say frozen: true for the one whose weights never change "
                    "(a judge, a reference model), or give both the same served_model_name"
                )
        for (one, model), (other, others_model) in product(frozen.items(), trained.items()):
            if model == others_model:
                raise ConfigError(
                    f"engines.{one} and engines.{other} both serve {model!r}, but engines.{one} alone is frozen: give "
                    "it a served_model_name of its own (it may be the other's reference model), or make both alike"
                )

"""Saves and restores the attached objects, either unsharded or as one set of shards per rank."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rekindle.errors import ConfigError


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Objects:
    """The attached objects by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        self._objects: dict[str, Any] = {}
        for name, value in objects.items():
            if value is None:
                continue
            if not isinstance(value, Stateful):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}: rekindle.attach saves objects that have"
                    " the methods state_dict and load_state_dict. Attach the model, the optimizer"
                    " and the scheduler, and leave out everything else."
                )
            # remove the wrapper, so that a process without DistributedDataParallel can load the
            # state
            is_wrapped = isinstance(value, DistributedDataParallel)
            self._objects[name] = value.module if is_wrapped else value

        if not self._objects:
            raise ConfigError(
                "rekindle.attach got nothing to save: pass at least model=... and optimizer=..."
            )

        self._models = [
            value for value in self._objects.values() if isinstance(value, torch.nn.Module)
        ]
        self.is_sharded = any(
            isinstance(parameter, DTensor)
            for model in self._models
            for parameter in model.parameters()
        )

    def save(self) -> dict[str, Any]:
        """Return the unsharded state of all objects."""
        return {name: value.state_dict() for name, value in self._objects.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore all objects from an unsharded state. Raises ConfigError."""
        self._check_names(states)
        for name, value in self._objects.items():
            self._load(name, value, states[name])

    def save_shards(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sharded states of models and optimizers (with DTensors), and the states of
        other objects, which are equal on all ranks. All ranks must call this method."""
        shards: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for name, value in self._objects.items():
            if isinstance(value, torch.nn.Module):
                shards[name] = get_model_state_dict(value)
            elif isinstance(value, Optimizer):
                shards[name] = get_optimizer_state_dict(self._find_model(name, value), value)
            else:
                shared[name] = value.state_dict()
        return shards, shared

    def load_shards(self, shards: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        """Restore all objects from shards. The model must be sharded as it was when the shards were
        saved. All ranks must call this method. Raises ConfigError."""
        self._check_names({**shards, **shared})
        for name, value in self._objects.items():
            if isinstance(value, torch.nn.Module):
                set_model_state_dict(value, shards[name])
            elif isinstance(value, Optimizer):
                model = self._find_model(name, value)
                set_optimizer_state_dict(model, value, shards[name])
            else:
                self._load(name, value, shared[name])

    def _find_model(self, name: str, optimizer: Optimizer) -> torch.nn.Module:
        """Return the model whose parameters an optimizer updates. Raises ConfigError."""
        updated = {id(item) for group in optimizer.param_groups for item in group["params"]}
        for model in self._models:
            if updated <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise ConfigError(
            f"{name} updates parameters of no attached model: the state of a sharded optimizer is"
            " saved by the names of the parameters. Attach the model, too."
        )

    def _load(self, name: str, value: Any, state: Any) -> None:
        try:
            value.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the checkpoint does not fit {name} ({reason}). Use the program that wrote it, or"
                " give this program another checkpoint folder."
            ) from error

    def _check_names(self, states: Mapping[str, Any]) -> None:
        if states.keys() != self._objects.keys():
            raise ConfigError(
                f"the checkpoint has the state of {', '.join(sorted(states))}, and the program"
                f" attaches {', '.join(sorted(self._objects))}: these must be the same. Attach the"
                " same objects, or give this program another checkpoint folder."
            )


def take_local(value: Any) -> Any:
    """Return a nested state in which each DTensor is replaced by the shard of this rank."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: take_local(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(take_local(item) for item in value)
    return value


def put_local(template: Any, local: Any) -> Any:
    """Return the nested state `local` with its shards converted back to DTensors, whose layout
    `template` defines."""
    if isinstance(template, DTensor):
        shard = local.to(template.to_local().device)
        return DTensor.from_local(
            shard,
            template.device_mesh,
            template.placements,
            run_check=False,
            shape=template.shape,
            stride=template.stride(),
        )
    if isinstance(template, dict):
        return {key: put_local(template[key], item) for key, item in local.items()}
    if isinstance(template, list | tuple):
        pairs = zip(template, local, strict=True)
        return type(template)(put_local(item, other) for item, other in pairs)
    return local

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


class AttachedObjects:
    """The objects that the user has passed to `rekindle.attach`, by name."""

    def __init__(self, objects_by_name: Mapping[str, Any]) -> None:
        """Raises ConfigError if an object has no state, or if no object is given."""
        self._objects: dict[str, Any] = {}
        for object_name, attached_object in objects_by_name.items():
            if attached_object is None:
                continue
            if not isinstance(attached_object, Stateful):
                raise ConfigError(
                    f"{object_name} is a {type(attached_object).__name__}: rekindle.attach saves"
                    " objects that have the methods state_dict and load_state_dict. Attach the"
                    " model, the optimizer and the scheduler, and leave out everything else."
                )
            # remove the wrapper, so that a process without DistributedDataParallel can load the
            # state
            is_wrapped = isinstance(attached_object, DistributedDataParallel)
            self._objects[object_name] = attached_object.module if is_wrapped else attached_object

        if not self._objects:
            raise ConfigError(
                "rekindle.attach got nothing to save: pass at least model=... and optimizer=..."
            )

        self._models = [
            attached_object
            for attached_object in self._objects.values()
            if isinstance(attached_object, torch.nn.Module)
        ]
        self.is_sharded = any(
            isinstance(parameter, DTensor)
            for model in self._models
            for parameter in model.parameters()
        )

    def save(self) -> dict[str, Any]:
        """Return the unsharded state of all objects."""
        return {
            object_name: attached_object.state_dict()
            for object_name, attached_object in self._objects.items()
        }

    def load(self, states_by_name: Mapping[str, Any]) -> None:
        """Restore all objects from an unsharded state. Raises ConfigError if the state does not fit
        the objects."""
        self._check_object_names(states_by_name)
        for object_name, attached_object in self._objects.items():
            self._load(object_name, attached_object, states_by_name[object_name])

    def save_shards(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sharded states of models and optimizers (with DTensors), and the states of
        other objects, which are equal on all ranks. All ranks must call this method."""
        shard_states: dict[str, Any] = {}
        shared_states: dict[str, Any] = {}
        for object_name, attached_object in self._objects.items():
            if isinstance(attached_object, torch.nn.Module):
                shard_states[object_name] = get_model_state_dict(attached_object)
            elif isinstance(attached_object, Optimizer):
                shard_states[object_name] = get_optimizer_state_dict(
                    self._find_model(object_name, attached_object), attached_object
                )
            else:
                shared_states[object_name] = attached_object.state_dict()
        return shard_states, shared_states

    def load_shards(
        self, shard_states: Mapping[str, Any], shared_states: Mapping[str, Any]
    ) -> None:
        """Restore all objects from shards. The model must be sharded as when the shards were saved.
        All ranks must call this method. Raises ConfigError if the shards do not fit the objects."""
        self._check_object_names({**shard_states, **shared_states})
        for object_name, attached_object in self._objects.items():
            if isinstance(attached_object, torch.nn.Module):
                set_model_state_dict(attached_object, shard_states[object_name])
            elif isinstance(attached_object, Optimizer):
                model = self._find_model(object_name, attached_object)
                set_optimizer_state_dict(model, attached_object, shard_states[object_name])
            else:
                self._load(object_name, attached_object, shared_states[object_name])

    def _find_model(self, object_name: str, optimizer: Optimizer) -> torch.nn.Module:
        """Return the model whose parameters an optimizer updates. Raises ConfigError if no attached
        model has all these parameters."""
        optimized_parameter_ids = {
            id(optimized_parameter)
            for parameter_group in optimizer.param_groups
            for optimized_parameter in parameter_group["params"]
        }
        for model in self._models:
            if optimized_parameter_ids <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise ConfigError(
            f"{object_name} updates parameters of no attached model: the state of a sharded"
            " optimizer is saved by the names of the parameters. Attach the model, too."
        )

    def _load(self, object_name: str, attached_object: Any, object_state: Any) -> None:
        try:
            attached_object.load_state_dict(object_state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the checkpoint does not fit {object_name} ({reason}). Use the program that wrote"
                " it, or give this program another checkpoint folder."
            ) from error

    def _check_object_names(self, states_by_name: Mapping[str, Any]) -> None:
        if states_by_name.keys() != self._objects.keys():
            raise ConfigError(
                f"the checkpoint has the state of {', '.join(sorted(states_by_name))}, and the"
                f" program attaches {', '.join(sorted(self._objects))}: these must be the same."
                " Attach the same objects, or give this program another checkpoint folder."
            )


def take_local_shards(nested_state: Any) -> Any:
    """Return a nested state with each DTensor replaced by the shard of this rank."""
    if isinstance(nested_state, DTensor):
        return nested_state.to_local()
    if isinstance(nested_state, dict):
        return {key: take_local_shards(nested_value) for key, nested_value in nested_state.items()}
    if isinstance(nested_state, list | tuple):
        return type(nested_state)(take_local_shards(nested_value) for nested_value in nested_state)
    return nested_state


def put_local_shards(state_template: Any, local_state: Any) -> Any:
    """Return the nested state `local_state` with each local shard converted to a DTensor, which
    has the layout of the DTensor at the same place in `state_template`."""
    if isinstance(state_template, DTensor):
        device_shard = local_state.to(state_template.to_local().device)
        return DTensor.from_local(
            device_shard,
            state_template.device_mesh,
            state_template.placements,
            run_check=False,
            shape=state_template.shape,
            stride=state_template.stride(),
        )
    if isinstance(state_template, dict):
        return {
            key: put_local_shards(state_template[key], local_value)
            for key, local_value in local_state.items()
        }
    if isinstance(state_template, list | tuple):
        value_pairs = zip(state_template, local_state, strict=True)
        return type(state_template)(
            put_local_shards(template_value, local_value)
            for template_value, local_value in value_pairs
        )
    return local_state

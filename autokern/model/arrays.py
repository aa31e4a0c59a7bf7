"""The parts of a model as NumPy arrays that share the memory of its tensors, so that their values are current.

`Inspected` records every object that a reading of a model depends on; `Inspected.holds` says whether it is still valid.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.module import Module

from autokern.core.releases.known import relied
from autokern.core.replay.effects import HOOKS
from autokern.kernels.array_parts import Array, Index
from autokern.kernels.family import DISTANCES
from autokern.model.parameters import Curve, Mirrored, Mirrors, Parameter, Still, bounded, curve_of

_OWN = frozenset(("_has_transformed_inputs", "_original_train_inputs", "_validate_args", "is_one_to_many"))
"""Attributes that instances set although their class defines them."""
_NO_BATCH = torch.Size()


class UnreadError(Exception):
    """A part of a model is unsupported; the message names it."""


def _function(closure: Any) -> Any:
    return getattr(closure, "__func__", closure)


_code = operator.attrgetter("co_code", "co_names")
_ALONE = _code((lambda self, tensor: self._transform(tensor)).__code__)
"""The transform of a constraint whose bounds are the optimiser's only, such as BoTorch's `LogTransformedInterval`."""


class Inspected:
    """The objects and memory that a reading of a model depends on.

    Modules are held weakly, since a reading is cached beside a model and must not keep it alive. All parameters have
    `dtype` and `batch`. Without `mirrors`, tensors on an accelerator are unsupported. For the model being read,
    `families` names the kernel's leaves, `raw` says whether a part takes uncentred points, and `tables` holds the
    covariances of tasks by the `id` of their kernels. If `models` is not 0, parameters are copied for that many models;
    otherwise they are read at each evaluation.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float64, batch: torch.Size = _NO_BATCH, mirrors: Mirrors | None = None
    ) -> None:
        self.dtype, self.batch, self._mirrors = dtype, batch, mirrors
        self.parameters: dict[int, Parameter] = {}  # by the identity of their raw tensors
        self.dims = self.models = 0
        self.adding: Any = None  # the module whose added loss is part of what is read
        self.begin(())
        self._relied: set[Any] = set()
        self._owners: dict[int, list[Any]] = {}  # each object, its attributes that were read, and the record of `look`
        self._memory: dict[int, tuple[torch.Tensor, int, torch.Size, tuple[int, ...], bool]] = {}
        self.still: dict[int, tuple[torch.Tensor, Array]] = {}  # tensors other than parameters, with their memory
        self._equal: list[tuple[Callable[[], Any], Any]] = []
        self._priors: list[tuple[weakref.ref[Any], str, weakref.ref[Any], Any]] = []

    def begin(self, at: tuple[Any, ...]) -> None:
        """Start to read the models at this index of the batch, or at this slice of its only axis."""
        self.at = at
        self.families: list[str] = []
        self.raw = False
        self.tables: dict[int, Index] = {}
        self._present: dict[int, Any] = {}

    def _hold(self, owner: Any, space: str, name: str) -> Any:
        """Record and return the entry of an object's `__dict__`, or of the dictionary `space` in it."""
        found = (owner.__dict__[space] if space else owner.__dict__).get(name)
        self._owner(owner)[1][space, name] = found
        return found

    def _owner(self, owner: Any) -> list[Any]:
        return self._owners.setdefault(id(owner), [owner, {}, (0, ())])

    def look(self, *modules: Any) -> None:
        """Raise UnreadError for modules with hooks or overridden attributes; adding some invalidates the reading."""
        for module in modules:
            own = module.__dict__
            redefined = [name for name in own if name not in _OWN and hasattr(type(module), name)]
            adds = own.get("_added_loss_terms") and module is not self.adding
            if redefined or adds or any(own.get(name) for name in HOOKS):
                raise UnreadError(f"a {type(module).__name__} with {redefined or 'hooks or added losses'} of its own")
            ours = isinstance(module, Module)  # gpytorch's modules call no hooks
            sizes = ("_priors", "_added_loss_terms") if ours else ("_parameters", "_buffers", *HOOKS)
            self._owner(module)[2] = len(own), [(name, len(own[name])) for name in ("_modules", *sizes)]
            self.relies(type(module))

    def relies(self, *names: Any) -> None:
        """Depend on functions or classes of the libraries, which must be of a known version and unpatched."""
        self._relied.update(names)

    def module(self, owner: torch.nn.Module, name: str) -> Any:
        """Record and return a submodule, or None."""
        if owner.__dict__.get(name) is not None:
            raise UnreadError(f"an attribute {name} that hides the module of this name")
        return self._hold(owner, "_modules", name)

    def attribute(self, owner: Any, name: str) -> Any:
        """Record and return an attribute of the instance, or None."""
        return self._hold(owner, "", name)

    def chosen(self, kernel: Any) -> Array | None:
        """Return the active dimensions of a kernel, None for all."""
        active = self._hold(kernel, "_buffers", "active_dims")
        return None if active is None else self.unchanging(active)

    def stays(self, now: Callable[[], Any]) -> None:
        """Depend on what a function returns."""
        self._equal.append((now, now()))

    def unchanging(self, tensor: torch.Tensor) -> Array:
        """Return a copy of a tensor's values, and depend on them."""
        seen = self._memory_of(tensor, fixed=True)
        self.stays(seen.tobytes)
        return seen.copy()

    def _memory_of(self, tensor: torch.Tensor, fixed: bool = False) -> Array:
        """Return the memory of a CPU tensor, or of another tensor's mirror; `fixed` forbids `requires_grad`."""
        if fixed and tensor.requires_grad:
            raise UnreadError("data, a buffer, a bound or a prior that want gradients")
        here = tensor.detach() if tensor.is_cpu else None if self._mirrors is None else self._mirrors.of(tensor)
        if here is None:
            raise UnreadError(f"a tensor on {tensor.device}")
        known = self._memory.get(id(tensor))
        fixed = fixed or (known is not None and known[-1])
        self._memory[id(tensor)] = tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), fixed
        array = here.numpy()
        if fixed:
            self.still[id(tensor)] = tensor, array
        return array

    def view(self, tensor: torch.Tensor, fixed: bool = False) -> Array:
        """Return the memory of a tensor that is an autograd leaf; `fixed` ones must not require a gradient."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype is not self.dtype:
            raise UnreadError(f"a tensor of {getattr(tensor, 'dtype', type(tensor))}")
        if tensor.layout is not torch.strided or tensor.grad_fn is not None:
            raise UnreadError("a tensor that is not an autograd leaf")
        return self._memory_of(tensor, fixed)

    def buffer(self, owner: torch.nn.Module, name: str) -> torch.Tensor:
        """Record and return a buffer."""
        tensor = self._hold(owner, "_buffers", name)
        if tensor is None:
            raise UnreadError(f"no buffer {name}")
        return tensor

    def parameter(self, owner: torch.nn.Module, name: str, shape: tuple[int, ...] = ()) -> Any:
        """Return a constrained parameter by the name of its raw tensor and its shape in one model."""
        tensor = self._hold(owner, "_parameters", name)
        if tensor is None or tensor.shape != (*self.batch, *shape):
            raise UnreadError(f"no parameter {name} of the expected shape")
        if tensor.is_inference():
            raise UnreadError(f"a parameter {name} made in inference mode")
        if id(tensor) in self._present:
            raise UnreadError(f"a parameter {name} that serves twice")
        known = self.parameters.get(id(tensor))
        if known is None:
            constraint = self.module(owner, f"{name}_constraint")
            kind = Parameter if tensor.is_cpu else Mirrored
            known = kind(tensor, self.view(tensor), None if constraint is None else self._transform(constraint))
            with np.errstate(all="ignore"):
                known.refresh()
            self.parameters[id(tensor)] = known
        found = known.of(self.at, shape) if self.batch else known
        self._present[id(tensor)] = Still(found, shape, self.models) if self.models else found
        return self._present[id(tensor)]

    def refresh(self) -> None:
        """Update the values of all parameters, and their copies for each model."""
        for parameter in (*self.parameters.values(), *self._present.values()):
            if isinstance(parameter, (Parameter, Still)):
                parameter.refresh()

    def present(self, tensor: Any) -> Any:
        """Return the parameter that was read from a raw tensor for the present model, or None."""
        return self._present.get(id(tensor))

    def _transform(self, constraint: Interval) -> Curve | None:
        kind = type(constraint)
        alone = isinstance(kind.transform, FunctionType) and _code(kind.transform.__code__) == _ALONE
        if kind not in (Positive, GreaterThan, LessThan, Interval) and not alone:
            raise UnreadError(f"a constraint {kind.__name__}")
        plain = "_transform" in constraint.__dict__
        transform = self.attribute(constraint, "_transform") if plain else self.module(constraint, "_transform")
        if isinstance(transform, torch.nn.Softplus):
            self.attribute(transform, "beta")
            self.attribute(transform, "threshold")
        if transform is None and not alone:
            return None
        curve = curve_of(transform)
        if curve is None:
            raise UnreadError(f"the transform {transform}")
        if kind is Positive or alone:
            return curve
        lower, upper = (self.constant(self.buffer(constraint, name)) for name in ("lower_bound", "upper_bound"))
        return functools.partial(bounded, kind, curve, lower, upper)

    def constant(self, tensor: torch.Tensor, shape: tuple[int, ...] = ()) -> Array:
        """Return the memory of a bound or of a prior's argument, of any float dtype: NumPy promotes as torch does."""
        if tensor.shape != shape:
            raise UnreadError("a bound or a prior's argument of another shape")
        return self._memory_of(tensor, fixed=True)

    def close(self, root: torch.nn.Module, whole: bool = True) -> None:
        """Finish the reading; raises UnreadError if `whole` and a parameter that requires a gradient was not read."""
        self.look(*root.modules())
        self.adding = None  # which a reading must not keep alive
        for module in root.modules():
            for name in module._modules:
                self._hold(module, "_modules", name)  # a replaced submodule may have priors
            for name, (prior, closure, _) in module.__dict__.get("_priors", {}).items():
                self._priors.append((weakref.ref(module), name, weakref.ref(prior), _function(closure)))
        if whole and {id(p) for p in root.parameters() if p.requires_grad} - self.parameters.keys():
            raise UnreadError("a trainable parameter of an unsupported part")
        several = self._owners.values()  # modules are owners, too, and are held weakly
        self._kept = [one for _, held, _ in several for one in held.values() if not isinstance(one, torch.nn.Module)]
        self._checks = [
            (weakref.ref(owner), type(owner), *looked, [(space, name, id(one)) for (space, name), one in held.items()])
            for owner, held, looked in several
        ]
        self._owners.clear()
        self._relied.update(DISTANCES)
        self._known = relied(*self._relied)
        if not self._known.holds():
            raise UnreadError(", ".join(f"{name} {why}" for name, why in self._known.unknown.items()))
        self._tensors = [*self._memory.values()]

    def _follows(self, index: int) -> bool:
        """Whether a parameter has new memory of the same shape, as by `vector_to_parameters`; use that from now on."""
        tensor, _, shape, _, fixed = self._tensors[index]
        parameter = self.parameters.get(id(tensor))
        if parameter is None or self.models or not tensor.is_cpu or tensor.shape != shape:
            return False
        try:
            parameter.raw = self.view(tensor, fixed)
        except UnreadError:
            return False
        self._tensors[index] = self._memory[id(tensor)]
        return True

    def holds(self) -> bool:
        """Whether objects and memory are the same, and no parameter has a gradient hook; updates the mirrors."""
        for ref, kind, size, sizes, held in self._checks:
            owner = ref()
            if owner.__class__ is not kind:
                return False
            own = owner.__dict__
            if size and len(own) != size:
                return False
            for name, length in sizes:
                if len(own[name]) != length:
                    return False
            for space, name, address in held:
                if id((own[space] if space else own).get(name)) != address:
                    return False
        for ref, name, prior, function in self._priors:
            present = ref().__dict__["_priors"].get(name)
            if present is None or present[0] is not prior() or _function(present[1]) is not function:
                return False
        for index, (tensor, pointer, shape, stride, fixed) in enumerate(self._tensors):
            moved = tensor.data_ptr() != pointer or tensor.shape != shape or tensor.stride() != stride
            if (moved and not self._follows(index)) or (fixed and tensor.requires_grad):
                return False
        for parameter in self.parameters.values():
            tensor = parameter.tensor
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return False
        if self._mirrors is not None:
            self._mirrors.pull()
        for now, then in self._equal:
            if now() != then:
                return False
        return self._known.holds()

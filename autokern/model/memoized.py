"""Results that the libraries cache, frozen copies of kernels, and the `State` of a model by which a cache is valid.

A key of the library's cache is a name, or a tuple of name, positional arguments and pickled keyword arguments. The
tensors of a frozen kernel are nodes of the caller's graph, so gradients reach the original parameters, also parameters
that `functional_call` swapped in. Stock caches the prior covariance when it computes the density. A density that skips
this stores a copy of the kernel and the values of its tensors, as plain objects that unpickle without autokern.

A cached factor is valid while the model's state has the same values: those of all parameters and buffers, of tensor
attributes of the libraries' own modules, and of the training data.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from gpytorch.priors import Prior
from linear_operator.utils.memoize import add_to_cache

from autokern.core.autograd import version
from autokern.core.errors import uninterrupted
from autokern.core.releases import LIBRARIES, is_of_libraries
from autokern.core.replay import Numbers, Pairs, are_equal

_CACHE = "_memoize_cache"
_NO_KEYWORDS = pickle.dumps({})


def names(holder: Any) -> list[str]:
    """Return the names of all cached results."""
    return [key[0] if isinstance(key, tuple) else key for key in holder.__dict__.get(_CACHE, ())]


def is_kept(holder: Any, name: str, *args: Any) -> bool:
    """Whether the result of a method with these positional arguments is cached."""
    return (name, args, _NO_KEYWORDS) in holder.__dict__.get(_CACHE, ())


def drop(holder: Any, unwanted: Collection[str], but: Collection[Any] = ()) -> None:
    """Drop the cached results of these methods, except those with one of the positional arguments `but`."""
    kept = holder.__dict__.get(_CACHE, {})
    for key in [key for key in kept if isinstance(key, tuple) and key[0] in unwanted and key[1] not in but]:
        del kept[key]


def mark(holder: Any, name: str) -> None:
    """Add a name to the cache, which the library empties in a backward pass."""
    holder.__dict__.setdefault(_CACHE, {})[name] = True


CHANGING = {
    "DistributionalInputKernel", "GridInterpolationKernel", "GridKernel", "InducingPointKernel", "LCEAKernel",
    "MultiDeviceKernel", "OrthogonalAdditiveKernel", "RFFKernel",
}  # fmt: skip
"""Library kernels whose evaluation draws, moves or caches state, or calls other objects."""
_ORIGINAL = "_autokern_frozen_from"
_THEIRS = LIBRARIES | {"torch"}


def is_library(module: torch.nn.Module) -> bool:
    """Whether a module and its parts are of the libraries' own classes, which keep no state in evaluation."""
    kind = type(module)
    own = (v for v in module.__dict__.values() if callable(v) and not isinstance(v, (torch.Tensor, type)))
    if not _is_theirs(kind) or kind.__name__ in CHANGING or not all(map(_is_theirs, own)):
        return False
    return all(part is None or is_library(part) for part in module._modules.values())


def _is_theirs(thing: Any) -> bool:
    """Whether a class or function comes from one of the libraries, or is built in."""
    return (getattr(thing, "__module__", None) or "torch").partition(".")[0] in _THEIRS


def frozen(module: torch.nn.Module, of: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return a copy of a library module whose tensors are copied by `of`, by default within the present graph.

    Unlike `copy.deepcopy`, it supports parameters that are not autograd leaves. Priors are shared, since no covariance
    reads them. A frozen module is returned unchanged, unless `of` is given.
    """
    if of is torch.clone and _ORIGINAL in module.__dict__:
        return module
    copied = object.__new__(type(module))
    own = copied.__dict__
    own.update((name, of(v) if isinstance(v, torch.Tensor) else v) for name, v in module.__dict__.items())
    own[_ORIGINAL] = module
    if own.get("_added_loss_terms"):
        own["_added_loss_terms"] = dict.fromkeys(own["_added_loss_terms"])
    for kind in ("_parameters", "_buffers"):
        own[kind] = {name: t if t is None else of(t) for name, t in own[kind].items()}
    own["_modules"] = {k: p if p is None or isinstance(p, Prior) else frozen(p, of) for k, p in own["_modules"].items()}
    return copied


def thawed(module: torch.nn.Module) -> torch.nn.Module:
    """Return the original of a frozen module, or the module itself if it is not frozen."""
    return module.__dict__.get(_ORIGINAL, module)


def by_kernel(kernel: Any, lazy: Any) -> LazyEvaluatedKernelTensor:
    """Return the lazy covariance of the points of `lazy` under another kernel."""
    return LazyEvaluatedKernelTensor(lazy.x1, lazy.x2, kernel=kernel, **lazy.params)


AGAIN: dict[type, type] = {}  # classes of kernels that warn, and those that compute the same later without warnings
_STATE, EVALUATED = "_autokern_state", "kernel_eval"
TERMS = "_autokern_terms"
"""Attribute of a covariance that autokern made of several (`forward`): these, one for each part of its kernel."""


def outline(kernel: torch.nn.Module) -> tuple[Any, list[torch.Tensor]]:
    """Return a copy of a kernel that has its tensors but does not keep it alive, and a list of the tensors."""
    tensors: dict[int, torch.Tensor] = {}
    copied = frozen(kernel, lambda tensor: tensors.setdefault(id(tensor), tensor))
    for one in copied.modules():
        if one.__dict__.pop(_ORIGINAL, None) is not None:  # priors are shared, not copied
            one.__dict__.update(_load_state_dict_pre_hooks={}, _priors={})  # these hold methods of the original
    return copied, list(tensors.values())


def remember(lazy: Any, kernel: Any, tensors: Sequence[torch.Tensor], values: Sequence[Any] = ()) -> None:
    """Store the `outline` of a kernel on its covariance, and `values`, or else copies of the tensors' present ones."""
    copies = values or [tensor.detach().clone() for tensor in tensors]
    for term, part in zip(lazy.__dict__.get(TERMS, ()), getattr(kernel, "kernels", ()), strict=False):
        remember(term, part, tensors, copies)
    lazy.__dict__[_STATE] = (id(lazy.x1), version(lazy.x1)), kernel, tensors, copies


def remember_kernel(lazy: Any) -> None:
    """Store the present kernel of a covariance, unless the covariance is cached or a kernel is stored already."""
    if _STATE not in lazy.__dict__ and (TERMS in lazy.__dict__ or not is_kept(lazy, EVALUATED)):
        remember(lazy, *outline(lazy.kernel))


def is_past(lazy: Any) -> bool:
    """Whether a covariance has stored values (`remember`), and is not evaluated yet."""
    return _STATE in lazy.__dict__ and not is_kept(lazy, EVALUATED)


def evaluate(lazy: Any) -> Any:
    """Evaluate and cache a covariance with the stored values, through which gradients reach the parameters."""
    with torch.set_grad_enabled(lazy._is_grad_enabled):
        return add_to_cache(lazy, EVALUATED, by_kernel(earlier(lazy), lazy).evaluate_kernel())


def earlier(lazy: Any) -> Any:
    """Return the kernel with the stored values of a covariance, through which gradients reach the parameters."""
    (identity, number), kernel, tensors, values = lazy.__dict__[_STATE]
    if identity == id(lazy.x1) and number != version(lazy.x1):  # a copy has its own version counter
        raise RuntimeError(
            "the covariance of a prior is read after its points were modified by an inplace operation since the "
            "density was computed; read it before"
        )
    with torch.set_grad_enabled(lazy._is_grad_enabled):
        then = {id(tensor): _Earlier.apply(tensor, value) for tensor, value in zip(tensors, values, strict=True)}
        found = frozen(kernel, lambda tensor: then[id(tensor)] if id(tensor) in then else tensor.clone())
    found.__class__ = AGAIN.get(type(found), type(found))
    return found


def apart(lazy: Any) -> LazyEvaluatedKernelTensor:
    """Return a covariance with the stored values of another one, without its kernel, and with a copy of its points."""
    (_, kernel, tensors, values), x = lazy.__dict__[_STATE], lazy.x1.clone()
    found = LazyEvaluatedKernelTensor(x, x, kernel=kernel, **lazy.params)
    found._is_grad_enabled = lazy._is_grad_enabled
    found.__dict__[_STATE] = (id(x), version(x)), kernel, tensors, values
    return found


class _Earlier(torch.autograd.Function):
    """The stored value of a tensor; its gradient is passed on to the tensor."""

    @staticmethod
    def forward(ctx, tensor, value):  # type: ignore[no-untyped-def]
        return torch.as_tensor(value, device=tensor.device).clone()  # of its own dtype: the model may have another now

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


_PLAIN = (bool, int, float, str, torch.Size, type(None))
_NOTED = frozenset(("_input_batch_shape", "_aug_batch_shape", "_original_train_inputs"))
"""Attributes that BoTorch sets on a model, and again on a new fantasy, and that no prediction reads."""


class State:
    """The state of a module and its submodules, by identity and by value, without references to the modules.

    It includes the training data of an exact Gaussian process, and leaves out priors, which no prediction reads, and
    `but` with its submodules. A buffer may be replaced by another one of the same values, as by BoTorch's transforms.
    """

    def __init__(self, root: torch.nn.Module, but: torch.nn.Module | None = None) -> None:
        self._read: list[tuple[weakref.ref[torch.nn.Module], Callable[[Any], tuple[Any, ...]] | None]] = []
        seen, stack = {id(but)}, [root]
        while stack:
            module = stack.pop()
            if id(module) not in seen and not isinstance(module, Prior):
                seen.add(id(module))
                self._read.append((weakref.ref(module), _reader(module)))
                stack += [part for part in module._modules.values() if part is not None]
        self._take(*self._present())

    def _take(self, addresses: list[Any], buffers: list[Any], kept: list[Any], data: list[Any]) -> None:
        self._addresses, self._buffers, self._data = addresses, buffers, data
        self._kept = [one for one in (*kept, *buffers, *data) if not isinstance(one, torch.nn.Module)]
        tensors = {id(one): one for one in self._kept if isinstance(one, torch.Tensor)}.values()
        self._versions = [(t, version(t)) for t in tensors]
        self._numbers = Numbers(tensors)

    def _present(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Return the present names, addresses and classes of objects; buffers; other objects; and training data."""
        addresses, buffers, found = list[Any](), list[Any](), list[Any]()
        for ref, read in self._read:
            module: Any = ref()
            own = module.__dict__  # raises AttributeError if the module was freed
            addresses.append(module.__class__)
            parameters, parts = own["_parameters"], own["_modules"]
            found += (*parameters.values(), *parts.values())
            buffers += own["_buffers"].values()
            addresses += (*parameters, *parts, *own["_buffers"])
            if read is None:
                found.append(own.get("forward"))
            else:
                found += read(own)
                addresses.append(len(own))
        root: Any = self._read[0][0]()
        data = [*(root.__dict__.get("train_inputs") or ()), root.__dict__.get("_train_targets")]
        addresses += map(id, found)
        return addresses, buffers, found, data

    def again(self) -> State | None:
        """Return the present state with any training data; None if other objects differ, or for inference tensors."""
        if (present := self._alike()) is None:
            return None
        found = object.__new__(State)
        found._read = self._read
        found._take(*present)
        return None if any(t.is_inference() for t, _ in found._versions) else found

    def _alike(self) -> tuple[list[Any], list[Any], list[Any], list[Any]] | None:
        """Return what is `_present`, None if an object other than a buffer or training data was replaced."""
        try:
            present = self._present()
        except uninterrupted(AttributeError, KeyError):  # a module is gone, or an attribute was deleted
            return None
        return present if present[0] == self._addresses else None

    def holds(self) -> bool:
        """Whether the module has the same objects with the same values."""
        renewed = self._renewed()
        return renewed is not None and self._numbers.hold() and are_equal(renewed)

    def counted(self) -> bool:
        """Whether an object was replaced or a version counter has changed; most values are not compared."""
        renewed = self._renewed()
        return renewed is None or not are_equal(renewed) or any(version(t) != then for t, then in self._versions)

    def _renewed(self) -> Pairs | None:
        """Return pairs of the new and the old tensor of replaced buffers; None if anything else was replaced."""
        present = self._alike()
        if present is None or [*map(id, present[3])] != [*map(id, self._data)]:
            return None
        pairs: Any = [(new, old) for new, old in zip(present[1], self._buffers, strict=True) if new is not old]
        return None if any(new is None or old is None for new, old in pairs) else pairs


def _reader(module: torch.nn.Module) -> Callable[[dict[str, Any]], tuple[Any, ...]] | None:
    """Return a getter of the attributes of a library's module that are numbers, strings, functions or tensors."""
    if not is_of_libraries(type(module).__module__):
        return None
    without = _NOTED | {"training"} if type(module) is FixedGaussianNoise else _NOTED  # it ignores its mode
    plain = [n for n, v in module.__dict__.items() if callable(v) or isinstance(v, (torch.Tensor, *_PLAIN))]
    return itemgetter(*[name for name in plain if name not in without])

"""An extension of griffe for the API page: fields of msgspec's structs are the parameters of their constructors."""

from typing import Any

import griffe


def _is_struct(cls: griffe.Class) -> bool:
    return any(str(base).rpartition(".")[2] == "Struct" for base in cls.bases)


class Structs(griffe.Extension):
    """Give each struct an `__init__` with its annotated fields, and their defaults."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add the constructor of a class that is a struct."""
        if not _is_struct(cls) or "__init__" in cls.members:
            return
        attributes = [
            member for member in cls.members.values() if member.is_attribute and "property" not in member.labels
        ]
        fields = [member for member in attributes if member.annotation is not None]
        either = griffe.ParameterKind.positional_or_keyword
        only = griffe.ParameterKind.keyword_only if "kw_only" in cls.keywords else either
        parameters = [griffe.Parameter("self", kind=either)]
        parameters += [griffe.Parameter(f.name, annotation=f.annotation, kind=only, default=f.value) for f in fields]
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), returns="None")
        cls.set_member("__init__", init)
        for field in fields:  # the docstring of the class tells them
            del cls.members[field.name]

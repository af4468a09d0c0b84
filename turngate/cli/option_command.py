"""Commands that take their options as one object. Typer creates the flags from the object's class.

The flags for gateway settings are generated from `turngate.config.ServeConfig`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from turngate.cli.command import Command

O = TypeVar("O")  # noqa: E741
DEFAULT = r"\[default: {}]"  # appended to help texts; the backslash keeps rich from reading it as markup
WHAT, BATCH = "What to run", "Batch"
_FIRST_PANELS = (WHAT, BATCH)


def describe_flag(
    help: str, panel: str | None = None, *names: str, default: object = "", metavar: str | None = None
) -> Any:
    """Describe a flag. `default` is the default that the help shows, for fields whose own default is None or empty."""
    shown = f" {DEFAULT.format(default)}" if default else ""
    return typer.Option(*names, help=help + shown, rich_help_panel=panel, metavar=metavar)


class ClusterCommand(Command):
    """A command whose flag --ray needs no value: `--ray` alone means `--ray=auto`, this machine's cluster."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], "-"]
        bare = (
            [
                "--ray=auto" if one == "--ray" and after.startswith("-") else one
                for one, after in zip(args, following, strict=True)
            ]
            if args
            else args
        )
        return super().parse_args(ctx, bare)


class OptionCommand(Generic[O]):
    """Wraps a command function that takes its options as one object. The wrapper's signature has one parameter per option, for typer.

    The signature is computed when typer inspects it, so defining a command does not load `turngate.config`.
    """

    def __init__(self, function: Callable[[O], None], options: type[O], settings: Sequence[str]) -> None:
        functools.update_wrapper(self, function, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        self._function, self._options, self._settings = function, options, settings

    def __call__(self, **values: Any) -> None:
        names = {option.name for option in fields(self._options)}  # type: ignore[arg-type]
        if self._settings:
            settings = {name: values.pop(name) for name in list(values) if name not in names}
            # typer may pass an empty list for a repeatable flag that was not passed.
            values["settings"] = {name: None if value == [] else value for name, value in settings.items()}
        self._function(self._options(**values))

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        hints = get_type_hints(self._options, include_extras=True)
        parameters = []
        for option in fields(self._options):  # type: ignore[arg-type]
            if option.name == "settings":
                parameters += _setting_parameters(self._settings)
            else:
                parameters.append(_parameter(option.name, hints[option.name], _default(option)))
        parameters.sort(key=_panel_order)
        return inspect.Signature(parameters, return_annotation=None)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: parameter.annotation for name, parameter in self.__signature__.parameters.items()}


def takes(options: type[O], settings: Sequence[str] = ()) -> Callable[[Callable[[O], None]], OptionCommand[O]]:
    """Return a decorator that gives a command the flags of an options class, and flags for the named gateway settings."""
    return lambda function: OptionCommand(function, options, settings)


def _panel_order(parameter: inspect.Parameter) -> int:
    """Return a sort key that puts the flags of `_FIRST_PANELS` first in the help."""
    panel = get_args(parameter.annotation)[-1].rich_help_panel
    return _FIRST_PANELS.index(panel) if panel in _FIRST_PANELS else len(_FIRST_PANELS)


def _default(option: Field[Any]) -> Any:
    return inspect.Parameter.empty if option.default is MISSING else option.default


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _setting_parameters(names: Sequence[str]) -> list[inspect.Parameter]:
    """Build a parameter for each setting. If a flag is not passed, its value is None, and the config file or the default applies."""
    import msgspec

    from turngate.config import CELL, ServeConfig

    hints = get_type_hints(ServeConfig, include_extras=True)
    settings = {setting.name: setting for setting in msgspec.structs.fields(ServeConfig)}
    parameters = []
    for name in settings if "*" in names else names:
        kind, about = get_args(hints[name])
        if "-cell" in names and about.extra["panel"] == CELL:
            continue
        flag = name.replace("_", "-")
        spelling = (f"--{flag}/--no-{flag}",) if kind is bool else ()
        unnamed = [value for value in _literals(kind) if value not in about.description]
        text = about.description + (f" One of {', '.join(_literals(kind))}." if unnamed else "")
        option = describe_flag(text, about.extra["panel"], *spelling, default=_format_default(settings[name].default))
        parameters.append(_parameter(name, Annotated[Optional[_flag_type(kind)], option], None))
    return parameters


def _format_default(default: object) -> str:
    """Format a setting's default for the help. Return an empty string for 0, False, None and lists, which are not shown."""
    if isinstance(default, int | float):
        return f"{default:g}" if default else ""
    return default if isinstance(default, str) else ""


def _literals(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _flag_type(kind: Any) -> Any:
    """Return the type of a setting's flag. For a Literal it is str, because `load_config` validates the value later."""
    if get_origin(kind) is Literal:
        return str
    if get_origin(kind) in (Union, types.UnionType):
        return next(member for member in get_args(kind) if member is not type(None))
    return kind

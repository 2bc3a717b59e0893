"""Configuration from a YAML file and dotted command-line options into dataclasses.

`--config run.yaml --optimizer.lr 1e-3`: later options win. A key that no dataclass has is an error with
the nearest known key; `--help` shows each field with the text written under it.
"""

import dataclasses
import difflib
import re
from argparse import ArgumentError
from collections.abc import Sequence
from typing import TypeVar

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

Config = TypeVar("Config")

set_parsing_settings(docstring_parse_attribute_docstrings=True)

# The three ways in which jsonargparse words "there is no such key".
_UNKNOWN = (
    re.compile(r"unrecognized arguments: --(?P<key>[\w.\-]+)"),
    re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'"),
    re.compile(r"Option '(?P<key>[\w.]+)' is not accepted"),
)


def build_parser(
    config_class: type, *, prog: str, description: str, flags: dict[str, str] | None = None
) -> ArgumentParser:
    """A parser for `config_class`, a dataclass of dataclasses, plus `--config` and yes/no `flags`."""
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file; may be given more than once")
    for name, text in (flags or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_class_arguments(config_class)
    return parser


def parse(
    parser: ArgumentParser, config_class: type[Config], arguments: Sequence[str] | None = None
) -> tuple[Config, dict[str, bool]]:
    """The configuration and the flags that are on.

    Raises ValueError, in one line with the key, the value and the nearest known key, for an unknown key,
    a value of the wrong type, a missing file, or what a dataclass refuses.
    """
    names = {field.name for field in dataclasses.fields(config_class)}
    try:
        values = parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(_explain(str(error), parser)) from error
    sections = parser.instantiate(values)
    config = config_class(**{name: sections[name] for name in names})
    flags = {key: on for key, on in vars(values).items() if key not in names and on is True}
    return config, flags


def _explain(message: str, parser: ArgumentParser) -> str:
    message = " ".join(message.split())
    for pattern in _UNKNOWN:
        found = pattern.search(message)
        if found is None:
            continue
        group = found.groupdict().get("group")
        key = f"{group}.{found['key']}" if group else found["key"]
        return f"unknown configuration key {key!r}{_suggestion(key, parser)}"
    return message


def _suggestion(key: str, parser: ArgumentParser) -> str:
    known = [action.dest for action in parser._actions if action.dest != "help"]
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    if not near:  # right name, wrong section: --lr for optimizer.lr
        last = key.rsplit(".", 1)[-1].replace("-", "_")
        near = [name for name in known if name.rsplit(".", 1)[-1] == last][:1]
    return f": did you mean {near[0]!r}?" if near else "; --help lists all keys"


def to_yaml(config: object) -> str:
    """The whole configuration as YAML that `--config` reads back to an equal one."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)

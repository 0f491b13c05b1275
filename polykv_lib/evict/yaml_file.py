"""YAML that a person edited: what it says twice is refused, not decided by order."""

import os
from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The file's content.

    Raises:
        ValueError: not YAML, or a key that stands twice in one mapping.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_OneOfEachKey)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except _TwiceError as error:
        raise ValueError(f"{path}, {error}") from error


class _TwiceError(Exception):
    """A key that stands twice, and where."""


class _OneOfEachKey(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise _TwiceError(
                    f"line {key.start_mark.line + 1}: `{key.value}` stands twice in one entry; "
                    "keep one of them."
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
